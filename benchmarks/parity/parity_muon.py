"""The parity table of ``optimizer=muon``: layouts of both engines, and controls that orthogonalise shards.

Newton-Schulz iterations are in float32 here, see ``parity_ranks.without_rounding``.
"""

from dataclasses import replace

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

MUON = Table(
    "muon",
    tuple("optimizer=muon" if override == "optimizer=adamw" else override for override in EXPERIMENT),
    ROWS,
    tuple(column for column in DENSE.columns if column.name in {"sft packed", "dpo packed"}),
    CONTROLS,
)
