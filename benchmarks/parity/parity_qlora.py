"""The parity table of ``adapter=qlora``: layouts of FSDP2 on a base model in 4 bits."""

from dataclasses import replace

from benchmarks.parity.parity_rows import DENSE, EXPERIMENT, Row, Table

KINDS = {"sft packed": "lora sft packed", "sft padded": "lora sft padded", "dpo": "lora dpo"}
COLUMNS = tuple(replace(DENSE.column(lora), name=name, engines=("fsdp2",)) for name, lora in KINDS.items())
KTO = DENSE.column("kto")
UNPAIRED = replace(
    KTO,
    overrides=(*KTO.overrides, "stage.reference=adapter_off"),
    engines=("fsdp2",),
    adapted=True,
)
ROWS = (
    *(DENSE.row(name) for name in ("fsdp2", "hsdp", "fsdp2 offload", "fsdp2 cp2")),
    Row(
        "fsdp2, recomputed",
        ("parallelism=fsdp2", "parallelism.activation_checkpointing=full"),
        engine="fsdp2",
        dims={"dp_shard": 2},
    ),
)
CONTROLS = (
    Row(
        "control: own values",
        ("parallelism=fsdp2",),
        engine="fsdp2",
        dims={"dp_shard": 2},
        fault="own_values",
    ),
)
QLORA = Table("qlora", (*EXPERIMENT, "adapter.quantize=nf4"), ROWS, (*COLUMNS, UNPAIRED), CONTROLS)
