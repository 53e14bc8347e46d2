"""Runs of test_any_to_any.py through the code of real runs, and comparisons between them."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import Tensor

from benchmarks.parity.parity_cells import write_adapter, write_samples
from benchmarks.parity.parity_experts import DEEPSEEK, QWEN3_MOE
from benchmarks.parity.parity_muon import MUON
from benchmarks.parity.parity_ranks import silence
from benchmarks.parity.parity_rows import EXPERIMENT, OVERLAPPED
from components.checkpoint.dcp import load_tensors, save_tensors
from components.contracts.batch import Batch
from components.contracts.data import BatchShard
from components.contracts.loss import LossOutput, TokenStats
from components.losses import NextToken
from components.optimizers import muon_in_float32
from components.proof.verdict import curve_error
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from runner.launch.checks import RunPreparation, check_launch
from runner.launch.prepare import prepare
from runner.records.run_record import RunRecord
from runner.training import rank
from runner.training.rank import run_rank
from tests.e2e.commands import composed
from tests.ranks import Ranks

STEPS, HALF = 5, 3

LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": ("parallelism=single",),
    "fsdp2": ("parallelism=fsdp2", "parallelism.dp=2"),
    "fsdp2 offload": (
        *("parallelism=fsdp2", "parallelism.dp=2", "parallelism.cpu_offload=true"),
        "parallelism.activation_offloading=true",
    ),
    "fsdp2 tp2": ("parallelism=fsdp2_tp2",),
    "fsdp2 cp2": ("parallelism=fsdp2_cp2", "parallelism.dp=2"),
    "hsdp": ("parallelism=hsdp",),
    "dp2 sharded": ("parallelism=megatron_dp2", *OVERLAPPED),
    "tp2": (
        *("parallelism=tp2", "parallelism.sequence_parallel=true"),
        "parallelism.activation_offloading=true",
    ),
    "pp2": ("parallelism=pp2",),
    "pp2vpp2": ("parallelism=pp2vpp2",),
    "pp2vpp2cp2": ("parallelism=pp2vpp2", "parallelism.cp=2"),
    "tp2pp2": ("parallelism=tp2pp2",),
    "tp2cp2": ("parallelism=tp2cp2",),
    "tp2dp2 whole": ("parallelism=tp2", "parallelism.dp=2", "parallelism.distributed_optimizer=true"),
    "fsdp2 ep2": ("parallelism=fsdp2_ep2",),
    "fsdp2 tp2ep2": ("parallelism=fsdp2_ep2", "parallelism.tp=2"),
    "fsdp2 cp2ep2": ("parallelism=fsdp2_ep2", "parallelism.cp=2", "parallelism.dp=1"),
    "dp4ep2 sharded": ("parallelism=ep2", "parallelism.dp=4", *OVERLAPPED),
    "pp2ep2": ("parallelism=pp2ep2",),
    "tp2ep2etp2": ("parallelism=tp2ep2etp2",),
}
UNLUCKY = ("stage=sft", "stage._target_=tests.distributed.any_to_any_cases.Unlucky", "optimizer.lr=1e-3")
PISSA = "adapter.init_lora_weights=pissa"
WORK: dict[str, tuple[str, ...]] = {
    "full": UNLUCKY,
    "lora dropout": (*UNLUCKY, "adapter=lora", "adapter.dropout=0.2"),
    "pissa": (*UNLUCKY, "adapter=lora", "adapter.r=4", PISSA),
    "attention dropout": (*UNLUCKY, "+model.architecture.attention_dropout=0.2"),
    "qlora": (*UNLUCKY, "adapter=lora", "adapter.quantize=nf4"),
    "dpo": ("stage=dpo", "optimizer.lr=1e-5"),
    "rm": ("stage=rm", "optimizer.lr=1e-5"),
    "lora rm": ("stage=rm", "adapter=lora", "optimizer.lr=1e-5"),
    "tr-dpo wpo": (
        *("stage=dpo", "optimizer.lr=1e-5", "stage.sync_reference_every=2", "stage.wpo=true"),
        *("stage.loss=[sigmoid,bco_pair]", "stage.loss_weights=[0.8,0.2]"),
    ),
    "neftune": (*UNLUCKY, "model.neftune_alpha=5.0"),
    "fp16": (*UNLUCKY, "run.dtype=fp16", "run.loss_scale.growth_interval=2"),
    "fp8": (*UNLUCKY, "run.dtype=fp8", "parallelism.fp8_recipe=rowwise_with_gw_hp"),
    "experts": UNLUCKY,
    "deepseek": UNLUCKY,
    "muon": UNLUCKY,
}
OF_PAIRS = ("dpo", "tr-dpo wpo", "rm", "lora rm")
"""Work on pairs, of which no step is skipped."""
MODELS = {"experts": QWEN3_MOE, "deepseek": DEEPSEEK, "muon": MUON.experiment}
"""Options of each work item that does not use the default model and optimizer."""


@dataclass(frozen=True)
class Unlucky(NextToken):
    """A loss that is NaN in the micro-batch whose token ids sum to ``total``."""

    total: int = 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output = super().__call__(stats, batch)
        bad = int(batch.input_ids.sum()) == self.total
        return LossOutput({"loss": output.terms["loss"] * math.nan}) if bad else output


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of train steps without timings."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "train/loss" in row]
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]

    def point(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}"

    @property
    def loaded(self) -> Path:
        """Folder of the state that the engine saved right after it had loaded the initial checkpoint."""
        return self.folder / "loaded"


class Matrix:
    """Four ranks and the runs under ``root``. Each uninterrupted run is made only once."""

    def __init__(self, root: Path) -> None:
        self.root, self.ranks = root, Ranks(4, megatron=True)
        self.wholes: dict[tuple[str, str], Run] = {}
        for kind in ("chat", "preference"):
            write_samples(kind, root / f"{kind}.jsonl", count=120)
        # Half of a new adapter's gradients are 0, and Adam amplifies noise.
        write_adapter(root / "adapter")
        write_adapter(root / "adapter_rm", (*EXPERIMENT, "stage=rm"))
        self.unlucky = self.first_tokens(step=1)

    def whole(self, work: str, layout: str) -> Run:
        """Return a run of all steps with a checkpoint after each of them.

        The second step is skipped, except of work on pairs.
        """
        if (work, layout) not in self.wholes:
            self.wholes[work, layout] = self.run(work, layout)
        return self.wholes[work, layout]

    def resumed(self, work: str, layout: str, point: Path) -> Run:
        """Return a run that resumes from ``point`` and ends with the last step."""
        return self.run(work, layout, f"checkpoint.resume={point}")

    def run(self, work: str, layout: str, *more: str) -> Run:
        launch = self.launch(work, layout, *more)
        run = Run(prepare(launch))
        self.ranks.run(train_rank, run.folder, run.loaded, size=launch.world_size)
        return run

    def launch(self, work: str, layout: str, *more: str) -> RunPreparation:
        chosen = (*WORK[work], *LAYOUTS[layout], *more)
        if work not in OF_PAIRS:
            chosen += (f"+stage.total={self.unlucky}",)
        if "adapter=lora" in chosen and PISSA not in chosen:
            chosen += (f"adapter.path={self.root}/adapter{'_rm' if 'stage=rm' in chosen else ''}",)
        here = (
            "run.name=matrix",
            f"run.output_dir={self.root}/runs",
            f"data.train={self.root}/{'preference' if work in OF_PAIRS else 'chat'}.jsonl",
            f"data.cache_dir={self.root}/cache",
            "data.num_workers=1",
            "run.global_batch_size=8",
            "run.micro_batch_size=2",
            f"run.max_steps={STEPS}",
            "checkpoint.save_every=1",
            "checkpoint.model_only=false",
            "checkpoint.keep_last=0",
            "scheduler=cosine",
            "scheduler.warmup_steps=2",
        )
        launch = check_launch(
            composed([*MODELS.get(work, EXPERIMENT), *here, *chosen]), ConfigSources(), command=chosen
        )
        return replace(launch, console=Console(quiet=True))

    def first_tokens(self, step: int) -> int:
        """Return the sum of the token ids of the first micro-batch of ``step``."""
        self.unlucky = 0
        launch = self.launch("full", "single")
        record = RunRecord.read(prepare(launch))
        data = build_experiment(launch.config, ConfigSources()).data.restore(record.data)
        loader = data.train_loader(BatchShard(global_batch_size=8, micro_batch_size=2))
        return int(loader.microbatches(step)[0].input_ids.sum())


def save(engine: Any, path: Path) -> None:
    """Save the engine's tensors. All ranks call it together."""
    save_tensors(path, engine.tensors())


def train_rank(folder: Path, loaded: Path) -> None:
    """Train the run that is prepared in ``folder``. Save the state that it resumes from to ``loaded``."""
    with silence(), muon_in_float32(), saving_what_is_loaded(loaded):
        run_rank(folder)


@contextmanager
def saving_what_is_loaded(path: Path) -> Iterator[None]:
    build_engine = rank.build_engine

    def build(*args: Any, **options: Any) -> Any:
        engine: Any = build_engine(*args, **options)
        load = engine.load

        def load_and_save(point: Path, **options: bool) -> None:
            load(point, **options)
            path.mkdir(exist_ok=True)
            save(engine, path)

        engine.load = load_and_save
        return engine

    with mock.patch.object(rank, "build_engine", build):
        yield


def read(point: Path, *, streams: bool = False) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, with the ranks' random generator states only if ``streams``."""
    stored = dcp.FileSystemReader(point).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)  # type: ignore[union-attr]
        for key, meta in stored.items()
        if streams or not key.startswith("rng")
    }
    load_tensors(point, tensors)
    return tensors


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that the tensors are bitwise equal."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_close_moments(found: dict[str, Tensor], expected: dict[str, Tensor], times: int = 1) -> None:
    """Assert that moments differ little, relative to the largest value of their kind.

    ``times`` multiplies the bounds.
    """
    assert found.keys() == expected.keys()
    # Squaring a number doubles its relative error.
    for kind, bound in (("exp_avg", 1e-6), ("exp_avg_sq", 2e-6), ("momentum_buffer", 1e-6)):
        names = [name for name in expected if name.startswith(f"{kind}/")]
        if not names:  # of another optimizer
            continue
        largest = max(float(expected[name].abs().max()) for name in names)
        errors = {name: float((found[name] - expected[name]).abs().max()) / largest for name in names}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= times * bound, f"{worst}: {errors[worst]:.1e}"


def assert_same_steps(found: Run, reference: Run, bound: float = 1e-5) -> None:
    """Assert that ``found`` took the steps of ``reference``, with exactly equal batches, rates and counts."""
    ours = found.rows
    theirs = [row for row in reference.rows if row["step"] >= ours[0]["step"]]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for key in (
        "lr",
        "num_tokens",
        "num_labels",
        "total_samples",
        "total_skipped",
        "seqlen_mean",
        "seqlen_max",
    ):
        assert [row[f"train/{key}"] for row in ours] == [row[f"train/{key}"] for row in theirs], key
    for key in ("train/loss", "train/grad_norm"):
        values = [torch.tensor([row[key] for row in rows], dtype=torch.float64) for rows in (ours, theirs)]
        assert curve_error(*values) <= bound, f"{key}: {values}"
