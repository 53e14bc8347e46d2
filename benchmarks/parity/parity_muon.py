"""The parity table of ``optimizer=muon``: every layout of FSDP2, and a control that orthogonalises shards.

Newton-Schulz iterations are in float32 here, see ``parity_ranks.without_rounding``.
"""

from benchmarks.parity.parity_rows import DENSE, EXPERIMENT, Row, Table

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
)

CONTROLS = (
    Row(
        "control: shards orthogonalised",
        ("parallelism=fsdp2", "parallelism.dp=2"),
        engine="fsdp2",
        dims={"dp_shard": 2},
        fault="own_shard",
    ),
)

MUON = Table(
    "muon",
    tuple("optimizer=muon" if override == "optimizer=adamw" else override for override in EXPERIMENT),
    ROWS,
    tuple(column for column in DENSE.columns if column.name in {"sft packed", "dpo packed"}),
    CONTROLS,
)
