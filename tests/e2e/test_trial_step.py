"""``run.trial_step``: the largest micro-batch is tried before the first step, which changes nothing."""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from components.contracts.batch import Batch
from components.contracts.errors import FAILED
from components.contracts.loss import Loss
from components.data.loader import TokenDataLoader
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer
from components.engines.shared.oom import REMEDY
from runner.records.run_dir import read_run_config
from runner.records.run_record import PeakMemory, RunRecord
from runner.training import loop
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


@pytest.mark.parametrize(("size", "trials"), [("2", 1), ("auto", 3)])
def test_too_little_memory_is_told_before_the_first_step(
    size: str, trials: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message has the remedies of preflight. A chosen size is first halved, from 4 to 2 and to 1."""
    out_of_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    chosen = (*SMALL, "run.trial_step=true", f"run.micro_batch_size={size}", f"run.output_dir={tmp_path}")
    with mock.patch("components.engines.fsdp2.engine.FSDP2Engine.train_microbatches", out_of_memory):
        assert call_here(*chosen) == FAILED
    said = capfd.readouterr().err
    assert "trial step, with the batch of step" in said
    assert f"out of memory: {REMEDY}" in said
    assert out_of_memory.call_count == trials
    ((estimate, changes),) = re.findall(r"\. Preflight estimated (\S+) MiB\. Changes .*: (.*)\.$", said, re.M)
    assert ("run.micro_batch_size=1 (" in changes) == (size == "2"), "a size of 1 is the smallest"
    assert "parallelism.dp=2 (" in changes
    assert max(map(float, re.findall(r"\((\S+) MiB", changes))) <= 0.9 * float(estimate) + 1


def test_a_chosen_size_is_halved_until_the_trial_fits(tmp_path: Path) -> None:
    """The run then has the curve of the size that its config.yaml and run.json record."""
    plain = FSDP2Engine.train_microbatches

    def limited(engine: FSDP2Engine, batches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        if max(len(batch.labels) for batch in batches) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(engine, batches, loss, last=last)

    chosen = (*SMALL, "data.packing=none", "run.trial_step=true")
    with mock.patch.object(FSDP2Engine, "train_microbatches", limited):
        run = run_here(tmp_path / "auto", *chosen, "run.micro_batch_size=auto")
    log = (run / "train.log").read_text()
    assert [f"with {size} rows in a micro-batch" in log for size in (4, 2, 1)] == [True, True, False]
    record = RunRecord.read(run)
    assert record.auto_micro_batch_size == read_run_config(run)["run"]["micro_batch_size"] == 1
    assert record.peak_memory == PeakMemory(), "the forecast was that of another size"
    assert curve(run) == curve(run_here(tmp_path / "one", *chosen, "run.micro_batch_size=1"))


@pytest.mark.parametrize("measured", [None, 3 << 30])
def test_the_peak_is_recorded_next_to_the_forecast(measured: int | None, tmp_path: Path) -> None:
    """On a CPU, where torch does not count the memory of tensors, there is no peak."""
    counted = contextlib.nullcontext() if measured is None else mock.patch.object(loop, "peak_memory")
    with counted as peak:
        if peak is not None:
            peak.return_value = measured
        run = run_here(tmp_path, *SMALL, "run.trial_step=true")
    forecast = json.loads((run / "preflight.json").read_text())["memory"]
    record = RunRecord.read(run)
    assert record.peak_memory == PeakMemory(max(stage["total"] for stage in forecast), measured)
    assert record.auto_micro_batch_size is None


def test_the_optimizer_has_its_state_in_the_trial(tmp_path: Path) -> None:
    states: list[int] = []
    plain = FSDP2Engine.abort_train_step

    def abort(engine: FSDP2Engine) -> None:
        assert isinstance(engine.optimizer, ShardedOptimizer)
        states.append(len(engine.optimizer.optimizer.state) - len(engine.weights))
        plain(engine)

    with mock.patch.object(FSDP2Engine, "abort_train_step", abort):
        run_here(tmp_path, *SMALL, "run.trial_step=true")
    assert states == [0]


def test_as_many_micro_batches_as_a_pipeline_holds(tmp_path: Path) -> None:
    describe, train, sizes = FSDP2Engine.describe, FSDP2Engine.train_microbatches, []

    def recorded(engine: FSDP2Engine, batches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        sizes.append(len(batches))
        train(engine, batches, loss, last=last)

    chosen = ("run.trial_step=true", "run.micro_batch_size=1", "run.global_batch_size=8", "run.max_steps=1")
    with (
        mock.patch.object(
            FSDP2Engine, "describe", lambda engine: describe(engine) | {"mesh": {"dims": {"pp": 3}}}
        ),
        mock.patch.object(FSDP2Engine, "train_microbatches", recorded),
    ):
        run_here(tmp_path, *SMALL, *chosen)
    assert sizes == [6, 8]


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
        run_here(tmp_path, *SMALL, f"data.packing={packing}", "run.trial_step=true")
    ((*_, missing),) = tried
    assert missing == 0
