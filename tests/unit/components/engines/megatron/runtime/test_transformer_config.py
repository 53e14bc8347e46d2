"""Options of Megatron for which the host would wait are off."""

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from components.contracts.engine import EngineOptions
from components.engines.megatron.runtime import transformer_config as module
from components.engines.megatron.runtime.transformer_config import transformer_config
from tests.distributed.cases import megatron, spec


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2)])
def test_stages_do_not_wait_for_the_whole_gpu(pp: int, vpp: int) -> None:
    options = EngineOptions(torch.float32, "cpu")
    config = transformer_config(spec("qwen2_four").config(), megatron(pp=pp, vpp=vpp), options)
    assert not (config.batch_p2p_comm and config.batch_p2p_sync)


@pytest.mark.parametrize("uses_te", [True, False])
def test_the_rotary_embedding_is_fused_with_transformer_engine(
    uses_te: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own reads the boundaries of sequences, which that engine has on the device."""
    monkeypatch.setattr(module, "uses_transformer_engine", lambda *_: uses_te)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    options = EngineOptions(torch.bfloat16, "cpu")
    config = transformer_config(spec("llama").config(), megatron(), options)
    assert config.apply_rope_fusion is config.transformer_engine is uses_te
