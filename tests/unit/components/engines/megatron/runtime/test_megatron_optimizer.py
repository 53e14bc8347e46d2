"""The optimizer state that the Megatron engine saves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from components.engines.megatron.runtime.model import build_chunks
from components.engines.megatron.runtime.optimizer import DenseOrExpertOptimizer, MegatronOptimizers
from components.engines.megatron.runtime.state_dict import load_batches


def update(inner: torch.optim.Optimizer, moments: tuple[str, ...]) -> MegatronOptimizers:
    chained: Any = SimpleNamespace(optimizer=inner)
    member = DenseOrExpertOptimizer(chained, dist.GroupMember.WORLD, False)  # type: ignore[arg-type]
    return MegatronOptimizers({False: member}, moments)


def test_the_count_of_updates_goes_on() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    kept = update(torch.optim.AdamW([parameter]), ("exp_avg", "exp_avg_sq"))
    kept.make_moments()
    assert kept.step == 0
    kept.set_step(5)
    assert kept.step == 5
    kept.of(parameter).optimizer.optimizer.step()
    assert kept.step == 6


@pytest.mark.parametrize("limit", [0, 100, 10_000])
def test_what_is_read_at_once_is_bounded(limit: int) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 30, 1, 8, 8)]
    kinds = ("model", "exp_avg", "exp_avg_sq")
    found = list(load_batches({parameter: [] for parameter in parameters}, kinds, limit))
    assert [piece for some in found for piece in some] == [(p, kind) for p in parameters for kind in kinds]
    sizes = [sum(4 * parameter.numel() for parameter, _ in some) for some in found]
    assert all(size <= limit or len(some) == 1 for size, some in zip(sizes, found, strict=True))


def test_nothing_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter, including torch's norms, is on the device that Megatron uses."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from components.contracts.engine import EngineOptions
    from components.engines.megatron.runtime.transformer_config import transformer_config
    from tests.distributed.cases import megatron, spec

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    try:
        options = EngineOptions(torch.float32, "cpu")
        config = transformer_config(spec("qwen3").config(), megatron(dp=1), options)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
        (chunk,) = build_chunks(spec("qwen3").config(), config)
        assert {parameter.device.type for parameter in chunk.parameters()} == {"meta"}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
