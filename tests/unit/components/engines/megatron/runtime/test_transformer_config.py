"""Options of Megatron for which the host would wait are off."""

import pytest
import torch

from components.engines.megatron.runtime.transformer_config import transformer_config
from tests.distributed.cases import megatron, spec


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2)])
def test_stages_do_not_wait_for_the_whole_gpu(pp: int, vpp: int) -> None:
    config = transformer_config(spec("qwen2_four").config(), megatron(pp=pp, vpp=vpp), torch.float32)
    assert not (config.batch_p2p_comm and config.batch_p2p_sync)
