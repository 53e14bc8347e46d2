"""The rows and columns of the parity tables as options of the command line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from components.proof.verdict import BOUND

Fault = Literal["norms_not_summed", "own_count", "own_load", "own_shard", "own_part", "own_values"]

COMMON = (
    "optimizer=adamw",
    "optimizer.weight_decay=0.1",
    "optimizer.max_grad_norm=1.0",
    "scheduler=constant",
    "data=files",
    "data.max_length=128",
    "run.global_batch_size=16",
    "run.max_steps=5",
    "run.dtype=fp32",
    "run.device=cpu",
    "run.export=false",
    "checkpoint.model_only=true",
)
EXPERIMENT = (
    # Four layers for pp4 and pp2vpp2, two query heads per key-value head, an odd vocabulary size.
    "model=tiny",
    "model.architecture.vocab_size=8193",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=16",
    # Larger than usual, so that attention and its gradients are far from uniform.
    "model.architecture.initializer_range=0.1",
    *COMMON,
    # Eight micro-batches per step, or four on each of two data-parallel ranks, fill all pipelines.
    "run.micro_batch_size=2",
)


@dataclass(frozen=True)
class Column:
    """A column of a parity table: a stage with its data and options."""

    name: str
    data: str
    """Name of the file for ``data.train``, without its extension."""
    overrides: tuple[str, ...]
    engines: tuple[str, ...] = ("fsdp2", "megatron")
    """Engines that support the column."""
    splits_matrices: bool = True
    """Whether layouts with tensor parallelism support the column."""
    adapted: bool = False
    """Whether a written adapter is trained. It has nonzero matrices, so that no gradient is zero."""
    bounds: tuple[float, float, float] = (BOUND, BOUND, BOUND)
    """Largest relative errors that pass: of the gradient, the loss and the gradient norm."""

    def supports(self, row: "Row") -> bool:
        return row.engine in self.engines and (self.splits_matrices or "tp" not in (row.dims or {}))

    @property
    def stage(self) -> str:
        (word,) = (word for word in self.overrides if word.startswith("stage="))
        return word.removeprefix("stage=")

    @property
    def is_slow(self) -> bool:
        """Whether the learning rate is so low that five steps change the loss little."""
        return "optimizer.lr=1e-5" in self.overrides


COLUMNS = (
    Column("pt", "text", ("stage=pt", "data.packing=concat", "optimizer.lr=1e-3")),
    Column("sft packed", "chat", ("stage=sft", "data.packing=bfd", "optimizer.lr=1e-3")),
    Column("sft padded", "chat", ("stage=sft", "data.packing=none", "optimizer.lr=1e-3")),
    Column(
        "sft neftune",
        "chat",
        ("stage=sft", "data.packing=bfd", "optimizer.lr=1e-3", "model.neftune_alpha=5.0"),
    ),
    Column("dpo packed", "preference", ("stage=dpo", "data.packing=bfd", "optimizer.lr=1e-5")),
    Column(
        "dpo shared prompt",
        "preference",
        ("stage=dpo", "data.packing=bfd", "data.share_prompt=true", "optimizer.lr=1e-5"),
        engines=("fsdp2",),
    ),
    Column(
        "tr-dpo wpo",
        "preference",
        (
            "stage=dpo",
            "stage.loss=[sigmoid,bco_pair,ipo]",
            "stage.loss_weights=[0.8,0.2,0.1]",
            "stage.wpo=true",
            "stage.sync_reference_every=2",
            "data.packing=bfd",
            "optimizer.lr=1e-5",
        ),
    ),
    Column("orpo", "preference", ("stage=orpo", "data.packing=bfd", "optimizer.lr=1e-5")),
    Column("simpo", "preference", ("stage=simpo", "data.packing=bfd", "optimizer.lr=1e-5")),
    # Few pairs, so that they repeat: on new pairs, the loss varies more between batches than steps lower it.
    Column(
        "rm packed",
        "preference",
        ("stage=rm", "data.packing=bfd", "data.max_samples=16", "optimizer.lr=1e-3"),
    ),
    Column("rm padded", "preference", ("stage=rm", "data.packing=none", "optimizer.lr=1e-5")),
    Column("kto", "unpaired", ("stage=kto", "data.packing=bfd", "optimizer.lr=1e-5")),
    Column("lora sft packed", "chat", ("stage=sft", "data.packing=bfd", "optimizer.lr=1e-3"), adapted=True),
    Column(
        "lora dropout",
        "chat",
        ("stage=sft", "data.packing=bfd", "optimizer.lr=1e-3", "adapter.dropout=0.2"),
        adapted=True,
    ),
    Column("lora sft padded", "chat", ("stage=sft", "data.packing=none", "optimizer.lr=1e-3"), adapted=True),
    Column(
        "lora dpo",
        "preference",
        ("stage=dpo", "stage.reference=adapter_off", "data.packing=bfd", "optimizer.lr=1e-5"),
        adapted=True,
    ),
    Column(
        "pissa sft packed",
        "chat",
        (
            "stage=sft",
            "data.packing=bfd",
            "optimizer.lr=1e-3",
            "adapter=lora",
            "adapter.r=4",
            "adapter.init_lora_weights=pissa",
        ),
    ),
    Column(
        "lora rm",
        "preference",
        ("stage=rm", "data.packing=bfd", "optimizer.lr=1e-5"),
        adapted=True,
    ),
)


@dataclass(frozen=True)
class Row:
    """A row of a parity table: a layout, and the facts about it that run.json must contain."""

    name: str
    overrides: tuple[str, ...]
    engine: str = "megatron"
    dims: Mapping[str, int] | None = None
    """Dimensions of the mesh that are not 1."""
    chunks: int = 1
    """Number of chunks of each pipeline stage."""
    fault: Fault | None = None
    """Fault that is injected on purpose."""

    @property
    def world_size(self) -> int:
        return math.prod((self.dims or {}).values())


SEQUENCE = "parallelism.sequence_parallel=true"
OVERLAPPED = (
    "parallelism.distributed_optimizer=true",
    "parallelism.overlap_grad_reduce=true",
    "parallelism.overlap_param_gather=true",
    "parallelism.bucket_size=100000",  # small enough for several buckets
    "parallelism.bias_activation_fusion=true",
)

REFERENCE = Row("fsdp2, one process", ("parallelism=single",), engine="fsdp2")

ROWS = (
    Row("single", ("parallelism=megatron",)),
    Row("fsdp2", ("parallelism=fsdp2",), engine="fsdp2", dims={"dp_shard": 2}),
    Row(
        "hsdp",
        ("parallelism=hsdp", "parallelism.blocks_per_group=2", "parallelism.prefetch_groups=1"),
        engine="fsdp2",
        dims={"dp_replicate": 2, "dp_shard": 2},
    ),
    Row(
        "fsdp2 offload",
        ("parallelism=fsdp2", "parallelism.cpu_offload=true", "parallelism.activation_offloading=true"),
        engine="fsdp2",
        dims={"dp_shard": 2},
    ),
    Row(
        "fsdp2 tp2",
        ("parallelism=fsdp2_tp2",),
        engine="fsdp2",
        dims={"dp_shard": 2, "tp": 2},
    ),
    Row(
        "fsdp2 cp2",
        ("parallelism=fsdp2_cp2",),
        engine="fsdp2",
        dims={"dp_shard": 2, "cp": 2},
    ),
    Row(
        "fsdp2 tp2cp2",
        ("parallelism=fsdp2_tp2cp2",),
        engine="fsdp2",
        dims={"dp_shard": 2, "cp": 2, "tp": 2},
    ),
    Row(
        "fsdp2 tp2cp2 offload, recomputed",
        (
            "parallelism=fsdp2_tp2cp2",
            "parallelism.dp=1",
            "parallelism.cpu_offload=true",
            "parallelism.activation_checkpointing=selective",
        ),
        engine="fsdp2",
        dims={"cp": 2, "tp": 2},
    ),
    Row("dp2", ("parallelism=megatron_dp2",), dims={"dp": 2}),
    Row("dp2 sharded", ("parallelism=megatron_dp2", *OVERLAPPED), dims={"dp": 2}),
    Row("tp2", ("parallelism=tp2",), dims={"tp": 2}),
    Row(
        "tp2 sp offload",
        ("parallelism=tp2", SEQUENCE, "parallelism.activation_offloading=true"),
        dims={"tp": 2},
    ),
    Row("pp2", ("parallelism=pp2",), dims={"pp": 2}),
    Row("pp4", ("parallelism=pp2", "parallelism.pp=4"), dims={"pp": 4}),
    Row("pp2vpp2", ("parallelism=pp2vpp2",), dims={"pp": 2}, chunks=2),
    Row("cp2", ("parallelism=cp2",), dims={"cp": 2}),
    Row("cp2 a2a", ("parallelism=cp2", "parallelism.cp_comm_type=a2a"), dims={"cp": 2}),
    Row("tp2pp2", ("parallelism=tp2pp2",), dims={"pp": 2, "tp": 2}),
    Row("tp2cp2", ("parallelism=tp2cp2",), dims={"cp": 2, "tp": 2}),
    Row("pp2dp2", ("parallelism=pp2", "parallelism.dp=2"), dims={"pp": 2, "dp": 2}),
    Row(
        "pp2dp2 sharded",
        (
            "parallelism=pp2",
            "parallelism.dp=2",
            *OVERLAPPED,
            "parallelism.activation_checkpointing=full",
            "parallelism.recompute_num_layers=1",
        ),
        dims={"pp": 2, "dp": 2},
    ),
    Row("tp2dp2 sp", ("parallelism=tp2", "parallelism.dp=2", SEQUENCE), dims={"dp": 2, "tp": 2}),
    Row("tp2pp2 sp", ("parallelism=tp2pp2", SEQUENCE), dims={"pp": 2, "tp": 2}),
)

CONTROLS = (
    Row(
        "control: norms not summed",
        ("parallelism=tp2", SEQUENCE),
        dims={"tp": 2},
        fault="norms_not_summed",
    ),
    Row(
        "control: own counts",
        ("parallelism=megatron_dp2",),
        dims={"dp": 2},
        fault="own_count",
    ),
)
"""Rows that must fail. If they pass, the table proves nothing."""
CONTROL_COLUMN = "sft packed"


@dataclass(frozen=True, eq=False)
class Table:
    """A parity table: the rows, columns and controls of one experiment."""

    name: str
    experiment: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    controls: tuple[Row, ...]
    control_column: str = CONTROL_COLUMN

    def row(self, name: str) -> Row:
        return next(row for row in (*self.rows, *self.controls) if row.name == name)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)


DENSE = Table("dense", EXPERIMENT, ROWS, COLUMNS, CONTROLS)
