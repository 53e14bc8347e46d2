"""``run.trial_step``: the largest micro-batch is tried before the first step, which changes nothing."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from components.contracts.errors import FAILED
from components.data.loader import TokenDataLoader
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer
from tests.e2e.commands import SMALL, call_here, curve, run_here

EXPERTS = [*SMALL, "model=moe_tiny", "model.architecture.moe_intermediate_size=32", "data.max_length=64"]
RUNS = {
    "dropout": [*SMALL, "adapter=lora", "adapter.dropout=0.1"],
    "pipeline": [*SMALL, "stage=dpo", "parallelism=tp2pp2"],
    "overlap": [
        *SMALL,
        "parallelism=megatron_dp2",
        "parallelism.distributed_optimizer=true",
        "parallelism.overlap_grad_reduce=true",
        "parallelism.overlap_param_gather=true",
    ],
    "sharded": [*SMALL, "parallelism=fsdp2", "stage=kto"],
    "muon": [*SMALL, "optimizer=muon"],
    "state of a class": [*SMALL, "optimizer=torch", "optimizer._target_=torch.optim.NAdam"],
    "fsdp2 experts": [*EXPERTS, "parallelism=fsdp2_ep2"],
    "megatron experts": [*EXPERTS, "parallelism=ep2"],
}


@pytest.mark.parametrize("chosen", RUNS.values(), ids=RUNS)
def test_the_curve_is_the_same(chosen: list[str], tmp_path: Path) -> None:
    """All rows are bitwise equal with and without a trial step."""
    curves = [
        curve(run_here(tmp_path / f"{trial}", *chosen, "run.export=false", f"run.trial_step={trial}"))
        for trial in ("true", "false")
    ]
    assert curves[0] == curves[1]


def test_too_little_memory_is_told_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with mock.patch("components.engines.fsdp2.engine.FSDP2Engine.train_microbatches", out_of_memory):
        assert call_here(*SMALL, "run.trial_step=true", f"run.output_dir={tmp_path}") == FAILED
    assert "trial step, with the batch of step" in capfd.readouterr().err


def test_the_optimizer_has_its_state_in_the_trial(tmp_path: Path) -> None:
    states: list[int] = []
    plain = FSDP2Engine.abort_train_step

    def abort(engine: FSDP2Engine) -> None:
        assert isinstance(engine.optimizer, ShardedOptimizer)
        states.append(len(engine.optimizer.optimizer.state) - len(engine.weights))
        plain(engine)

    with mock.patch.object(FSDP2Engine, "abort_train_step", abort):
        run_here(tmp_path, *SMALL, "run.export=false", "run.trial_step=true")
    assert states == [0]


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_the_largest_microbatch(packing: str, tmp_path: Path) -> None:
    """No micro-batch of the first epoch has more tokens than the one that is tried."""
    tried: list[tuple[int, int, int]] = []
    plain = TokenDataLoader.largest_microbatch

    def largest(loader: TokenDataLoader) -> tuple[int, int]:
        step, index = plain(loader)
        batches = [loader.microbatches(number) for number in range(loader.num_steps)]
        longest = torch.max if packing == "none" else torch.sum
        sizes = [[int(longest(batch.seqlens)) for batch in each] for each in batches]
        tried.append((step, index, sizes[step][index] - max(map(max, sizes))))
        return step, index

    with mock.patch.object(TokenDataLoader, "largest_microbatch", largest):
        run_here(tmp_path, *SMALL, f"data.packing={packing}", "run.export=false", "run.trial_step=true")
    ((*_, missing),) = tried
    assert missing == 0
