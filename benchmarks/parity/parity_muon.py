"""The parity tables of ``optimizer=muon``: layouts of both engines, and controls that orthogonalise shards.

Newton-Schulz iterations are in float32 here, see ``components.optimizers.muon_in_float32``.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.parity.parity_experts import EP2, QWEN3_MOE
from benchmarks.parity.parity_rows import DENSE, EXPERIMENT, SEQUENCE, Row, Table

RECOMPUTED = "parallelism.activation_checkpointing=full"


def fsdp2(name: str, *overrides: str, replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1) -> Row:
    sizes = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
    chosen = (
        "parallelism=fsdp2",
        f"parallelism.dp={replicate * shard}",
        *(f"parallelism.{key}={size}" for key, size in sizes.items() if key != "dp_shard" and size > 1),
        *overrides,
    )
    return Row(name, chosen, engine="fsdp2", dims={key: size for key, size in sizes.items() if size > 1})


def megatron(name: str, *overrides: str, chunks: int = 1, **sizes: int) -> Row:
    chosen = ("parallelism=megatron", *(f"parallelism.{key}={size}" for key, size in sizes.items()))
    return Row(name, (*chosen, *overrides), dims=sizes, chunks=chunks)


SHARDED = "parallelism.distributed_optimizer=true"

ROWS = (
    fsdp2("dp2", shard=2),
    fsdp2("dp4", shard=4),
    fsdp2("dp2, whole copies", replicate=2),
    fsdp2("hsdp 2 x 2", replicate=2, shard=2),
    fsdp2("dp2, not resharded", "parallelism.reshard_after_forward=false", shard=2),
    fsdp2("dp2, recomputed", RECOMPUTED, shard=2),
    fsdp2("tp2", tp=2),
    fsdp2("tp2 dp2", shard=2, tp=2),
    fsdp2("tp2, copies", replicate=2, tp=2),
    fsdp2("cp2", cp=2),
    fsdp2("cp4", cp=4),
    fsdp2("cp2 dp2", shard=2, cp=2),
    fsdp2("cp2, copies", replicate=2, cp=2),
    fsdp2("tp2 cp2", cp=2, tp=2),
    fsdp2("tp2 cp2 dp2", shard=2, cp=2, tp=2),
    fsdp2("tp2 cp2, recomputed", RECOMPUTED, cp=2, tp=2),
    megatron("megatron"),
    megatron("megatron tp2", tp=2),
    megatron("megatron tp2, sequence parallel", SEQUENCE, tp=2),
    megatron("megatron pp2", pp=2),
    megatron("megatron pp2, interleaved", "parallelism.vpp=2", pp=2, chunks=2),
    megatron("megatron dp2", dp=2),
    megatron("megatron dp2, sharded", SHARDED, "parallelism.overlap_grad_reduce=true", dp=2),
    megatron("megatron cp2", cp=2),
    megatron("megatron cp2, sharded", SHARDED, cp=2),
    megatron("megatron tp2 pp2", tp=2, pp=2),
    megatron("megatron tp2 dp2, sharded", SHARDED, tp=2, dp=2),
    megatron("megatron tp2 pp2 dp2, sharded", SEQUENCE, SHARDED, tp=2, pp=2, dp=2),
)

CONTROLS = (
    Row(
        "control: shards orthogonalised",
        ("parallelism=fsdp2", "parallelism.dp=2"),
        engine="fsdp2",
        dims={"dp_shard": 2},
        fault="own_shard",
    ),
    replace(megatron("control: tensor-parallel shards orthogonalised", tp=2), fault="own_part"),
)

ETP2 = "parallelism.etp=2"

EXPERT_ROWS = (
    fsdp2("dp2 ep2", EP2, shard=2),
    fsdp2("tp2 ep2", EP2, shard=2, tp=2),
    megatron("megatron dp2 ep2", EP2, dp=2),
    megatron("megatron dp4 ep2, sharded", EP2, SHARDED, dp=4),
    megatron("megatron tp2 dp2 ep2 etp2, sharded", SEQUENCE, EP2, ETP2, SHARDED, tp=2, dp=2),
    megatron("megatron pp2 dp2 ep2", EP2, pp=2, dp=2),
    megatron("megatron cp2 ep2, sharded", EP2, SHARDED, cp=2),
)


def with_muon(experiment: Sequence[str]) -> tuple[str, ...]:
    return tuple("optimizer=muon" if override == "optimizer=adamw" else override for override in experiment)


COLUMNS = tuple(column for column in DENSE.columns if column.name in {"sft packed", "dpo packed"})
MUON = Table("muon", with_muon(EXPERIMENT), ROWS, COLUMNS, CONTROLS)
MUON_EXPERTS = Table("muon_experts", with_muon(QWEN3_MOE), EXPERT_ROWS, COLUMNS, CONTROLS[:1])
