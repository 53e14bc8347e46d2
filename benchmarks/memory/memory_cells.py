"""Layouts and work items whose memory is measured, and the cells of their table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.compose import composed
from benchmarks.memory.memory_ranks import measure
from components.engines.fsdp2.compile import choose_kernels
from components.preflight.engine_layouts import EngineLayout, memory
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from runner.training.assembly import DTYPES
from tests.ranks import Ranks

BOUND = 0.15
"""Largest error of an estimate, relative to the measured peak."""

FULL = "parallelism.activation_checkpointing=full"
SELECTIVE = "parallelism.activation_checkpointing=selective"
SHARDED = "parallelism.distributed_optimizer=true"

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "single": ("parallelism=single",),
    "single recomputed": ("parallelism=single", FULL),
    "single selective": ("parallelism=single", SELECTIVE),
    "fsdp2": ("parallelism=fsdp2",),
    "fsdp2 offload": ("parallelism=fsdp2", "parallelism.cpu_offload=true"),
    "fsdp2 kept": ("parallelism=fsdp2", "parallelism.reshard_after_forward=false"),
    "fsdp2 every": ("parallelism=fsdp2", "parallelism.reduce_gradients=every"),
    "hsdp": ("parallelism=hsdp",),
    "fsdp2 tp2": ("parallelism=fsdp2_tp2", "parallelism.dp=1"),
    "fsdp2 cp2": ("parallelism=fsdp2_cp2", "parallelism.dp=1"),
    "megatron": ("parallelism=megatron",),
    "megatron recomputed": ("parallelism=megatron", FULL),
    "megatron selective": ("parallelism=megatron", SELECTIVE),
    "dp2": ("parallelism=megatron_dp2",),
    "dp2 sharded": ("parallelism=megatron_dp2", SHARDED),
    "tp2": ("parallelism=tp2",),
    "tp2 sp": ("parallelism=tp2", "parallelism.sequence_parallel=true"),
    "pp2": ("parallelism=pp2",),
    "pp2vpp2": ("parallelism=pp2vpp2",),
    "tp2pp2": ("parallelism=tp2pp2",),
    "cp2": ("parallelism=cp2",),
    "fsdp2 ep2": ("parallelism=fsdp2", "parallelism.ep=2"),
    "ep2": ("parallelism=megatron_dp2", "parallelism.ep=2"),
}


@dataclass(frozen=True)
class Work:
    """A work item: what is trained, and on how many tokens."""

    overrides: tuple[str, ...]
    workload: MicrobatchShape
    layouts: Collection[str] = tuple(name for name in LAYOUTS if "ep2" not in name)
    """Layouts to measure by default."""


SMALL = (
    "model.architecture.vocab_size=16384",
    "model.architecture.hidden_size=384",
    "model.architecture.intermediate_size=1152",
    "model.architecture.num_hidden_layers=8",
    "model.architecture.num_attention_heads=6",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=64",
)

EXPERTS = ("single", "fsdp2", "fsdp2 ep2", "megatron", "ep2")

SOME = ("single", "fsdp2", "fsdp2 tp2", "fsdp2 cp2", "megatron", "dp2 sharded", "tp2", "pp2")

ALL_MUON = (*SOME, "hsdp", "tp2pp2", "dp2")

WORKS: dict[str, Work] = {
    "tiny": Work(("stage=pt",), MicrobatchShape(rows=1, length=1024, labels=1024, num_microbatches=2)),
    "small": Work(("stage=pt", *SMALL), MicrobatchShape(rows=1, length=512, labels=512, num_microbatches=2)),
    "short": Work(("stage=pt",), MicrobatchShape(rows=1, length=64, labels=64, num_microbatches=1), SOME),
    "bf16": Work(("stage=pt", "run.dtype=bf16"), MicrobatchShape(1, 1024, 1024, 2), SOME),
    "padded": Work(("stage=sft", "data.packing=none"), MicrobatchShape(4, 256, 512, 2), SOME),
    "dpo": Work(("stage=dpo",), MicrobatchShape(1, 1024, 512, 2), SOME),
    "lora": Work(("stage=sft", "adapter=lora"), MicrobatchShape(1, 1024, 512, 2), SOME),
    "qlora": Work(("stage=sft", "adapter=qlora"), MicrobatchShape(1, 1024, 512, 2), ("single", "fsdp2")),
    "qlora bf16": Work(
        ("stage=dpo", "adapter=qlora", "run.dtype=bf16", *SMALL),
        MicrobatchShape(1, 64, 32, 1),
        ("single", "fsdp2"),
    ),
    "dora": Work(("stage=sft", "adapter=dora"), MicrobatchShape(1, 1024, 512, 2), ("single", "fsdp2")),
    "muon": Work(("stage=pt", "optimizer=muon"), MicrobatchShape(1, 64, 64, 1), ALL_MUON),
    "muon bf16": Work(("stage=pt", "optimizer=muon", "run.dtype=bf16"), MicrobatchShape(1, 64, 64, 1), SOME),
    "ema": Work(("stage=pt", "hook=ema"), MicrobatchShape(1, 64, 64, 1), SOME),
    "experts": Work(("stage=pt", "model=moe_tiny"), MicrobatchShape(1, 1024, 1024, 2), EXPERTS),
    "long": Work(
        ("stage=pt", "model.architecture.max_position_embeddings=65536"),
        MicrobatchShape(1, 65536, 65536, 1),
        ("single recomputed",),
    ),
}

GPU = ("model=qwen3_0_6b", "model.init=random", "run.kernels=torch")
"""A model that is large compared with the memory that a GPU's libraries reserve."""

GPU_WORKS: dict[str, Work] = {
    "0.6B": Work(("stage=pt", *GPU), MicrobatchShape(1, 2048, 2048, num_microbatches=2)),
    "0.6B bf16": Work(
        ("stage=pt", "run.dtype=bf16", *GPU), MicrobatchShape(2, 2048, 4096, num_microbatches=2)
    ),
    "0.6B dpo": Work(
        ("stage=dpo", "run.dtype=bf16", *GPU), MicrobatchShape(1, 4096, 2048, num_microbatches=2)
    ),
    "0.6B lora": Work(
        ("stage=sft", "adapter=lora", "run.dtype=bf16", *GPU),
        MicrobatchShape(2, 2048, 2048, num_microbatches=2),
    ),
}


@dataclass(frozen=True)
class Cell:
    """Estimate and measured peak of one pipeline stage."""

    layout: str
    work: str
    stage: int
    held: int
    """Peak in bytes of the rank of the stage with the highest peak."""
    parts: Mapping[str, int]

    @property
    def estimate(self) -> int:
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        return self.estimate / self.held

    @property
    def passes(self) -> bool:
        return abs(self.ratio - 1) <= BOUND


class Bench:
    """The measurement of cells on one device."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        self.works = WORKS if device == "cpu" else GPU_WORKS

    def can_run(self, layout: str) -> bool:
        """Return whether a layout can be measured.

        On a GPU, it must have one rank.
        """
        return self.device == "cpu" or self.compose(layout, next(iter(self.works)))[1] == 1

    def cells(self, layout: str, work: str) -> list[Cell]:
        """Measure a work item in a layout and return one cell per pipeline stage."""
        config, world_size = self.compose(layout, work)
        workload = self.works[work].workload
        stages = estimated(build_experiment(config, ConfigSources()), world_size, workload, self.device)
        if self.device == "cuda":  # of one rank; CUDA cannot start in a forked process
            held = [measure(config, workload, self.device)]
        else:
            seconds = 60 + workload.length / 64  # a limit for hangs
            ranks = Ranks(world_size, megatron=True)
            held = ranks.run(measure, config, workload, self.device, seconds=seconds)
        return [
            Cell(layout, work, s.stage, max(h.peak for h in held if h.stage == s.stage), s.parts)
            for s in stages
        ]

    def compose(self, layout: str, work: str) -> tuple[dict[str, Any], int]:
        """Return the config of the experiment and its world size."""
        overrides = ("run.name=memory", f"run.device={self.device}", *LAYOUTS[layout])
        config = composed((*overrides, *self.works[work].overrides))
        return config, build_experiment(config, ConfigSources()).parallelism.world_size({}, 0)


def estimated(
    experiment: Experiment, world_size: int, workload: MicrobatchShape, device: Literal["cpu", "cuda"]
) -> list[RankMemory]:
    source = experiment.reference
    run, model = experiment.run, experiment.model.build(experiment.model.config())
    step = MemoryInputs(
        world_size=world_size,
        dtype=DTYPES[run.dtype],
        device=device,
        microbatch=workload,
        loss=experiment.stage,
        reference=source.engine_mode,
        adapter=experiment.adapter,
        weight_copies=sum(hook.weight_copies for hook in experiment.hook.values()),
        tiled_norms=choose_kernels(run.kernels, model, device, compiled=run.compile) == "tiled",
    )
    assert isinstance(experiment.parallelism, EngineLayout)
    return memory(experiment.parallelism, model, experiment.optimizer, step)
