"""Parity tables of MoE models, with router losses that are large enough to affect the gradients."""

from dataclasses import replace

from benchmarks.parity.parity_rows import COLUMNS, COMMON, OVERLAPPED, SEQUENCE, Row, Table

SHAPE = (
    "model.architecture.vocab_size=8193",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.moe_intermediate_size=48",
    "model.architecture.num_attention_heads=4",
    "model.architecture.initializer_range=0.1",
    # Router losses depend on micro-batches. Micro-batches of one row are the same in every layout.
    "run.micro_batch_size=1",
    "model.moe.z_loss_coef=0.01",
)
QWEN3_MOE = (
    "model=moe_tiny",
    *SHAPE,
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=16",
    "model.moe.aux_loss=switch",
    "model.moe.aux_loss_coef=0.1",
    *COMMON,
)
DEEPSEEK = (
    "model=deepseek_tiny",
    *SHAPE,
    "model.architecture.num_key_value_heads=4",
    "model.architecture.q_lora_rank=24",
    "model.architecture.kv_lora_rank=16",
    "model.architecture.qk_nope_head_dim=16",
    "model.architecture.qk_rope_head_dim=8",
    "model.architecture.v_head_dim=12",
    "model.moe.aux_loss=sequence",
    "model.moe.aux_loss_coef=0.1",
    "model.moe.bias_update_rate=0.01",
    *COMMON,
)

MEGATRON = ("parallelism=megatron",)
EP2 = "parallelism.ep=2"

ROWS = (
    Row("single", MEGATRON),
    Row("dp2 ep2", (*MEGATRON, "parallelism.dp=2", EP2), dims={"dp": 2}),
    Row(
        "dp2 ep2 allgather",
        (*MEGATRON, "parallelism.dp=2", EP2, "parallelism.moe_token_dispatcher=allgather"),
        dims={"dp": 2},
    ),
    Row("dp4 ep2 sharded", (*MEGATRON, "parallelism.dp=4", EP2, *OVERLAPPED), dims={"dp": 4}),
    Row("tp2 sp", ("parallelism=tp2", SEQUENCE), dims={"tp": 2}),
    Row("tp2ep2 sp", ("parallelism=tp2", SEQUENCE, EP2), dims={"tp": 2}),
    Row(
        "tp2ep2etp2 sp",
        ("parallelism=tp2", "parallelism.dp=2", SEQUENCE, EP2, "parallelism.etp=2"),
        dims={"dp": 2, "tp": 2},
    ),
    Row("pp2ep2", ("parallelism=pp2", "parallelism.dp=2", EP2), dims={"pp": 2, "dp": 2}),
    Row("pp2vpp2ep2", ("parallelism=pp2vpp2", "parallelism.dp=2", EP2), dims={"pp": 2, "dp": 2}, chunks=2),
    Row("cp2ep2", ("parallelism=cp2", EP2), dims={"cp": 2}),
    Row("fsdp2", ("parallelism=fsdp2",), engine="fsdp2", dims={"dp_shard": 2}),
    Row("fsdp2 ep2", ("parallelism=fsdp2", EP2), engine="fsdp2", dims={"dp_shard": 2}),
    Row(
        "hsdp ep2",
        ("parallelism=hsdp", "parallelism.dp=4", EP2),
        engine="fsdp2",
        dims={"dp_replicate": 2, "dp_shard": 2},
    ),
    Row("fsdp2 cp2", ("parallelism=fsdp2_cp2", "parallelism.dp=1"), engine="fsdp2", dims={"cp": 2}),
    Row("fsdp2 cp2ep2", ("parallelism=fsdp2_cp2", EP2), engine="fsdp2", dims={"dp_shard": 2, "cp": 2}),
    Row("fsdp2 tp2", ("parallelism=fsdp2_tp2", "parallelism.dp=1"), engine="fsdp2", dims={"tp": 2}),
    Row("fsdp2 tp2ep2", ("parallelism=fsdp2_tp2", EP2), engine="fsdp2", dims={"dp_shard": 2, "tp": 2}),
)

CONTROLS = (
    Row(
        "control: a rank's own load",
        ("parallelism=fsdp2_cp2", "parallelism.dp=1"),
        engine="fsdp2",
        dims={"cp": 2},
        fault="own_load",
    ),
)

NAMES = ("pt", "sft packed", "sft padded", "dpo packed")
TAKEN = tuple(replace(column, engines=("fsdp2", "megatron")) for column in COLUMNS if column.name in NAMES)


def in_larger_micro_batches(number: int, row: Row) -> Row:
    """Return ``row`` with larger micro-batches than those of the reference.

    With ``model.moe.aux_loss=sequence``, the result does not depend on the size of micro-batches.
    """
    dims = row.dims or {}
    data_ranks = dims.get("dp", 1) * dims.get("dp_replicate", 1) * dims.get("dp_shard", 1)
    size = min((2, 4, 8)[number % 3], 16 // data_ranks)
    return replace(row, overrides=(*row.overrides, f"run.micro_batch_size={size}"))


EXPERTS = Table("experts", QWEN3_MOE, ROWS, TAKEN, CONTROLS)
LATENT = Table(
    "deepseek",
    DEEPSEEK,
    tuple(in_larger_micro_batches(number, row) for number, row in enumerate(ROWS)),
    TAKEN,
    CONTROLS,
)
