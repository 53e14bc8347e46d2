"""The parity table of bf16, fp16 and fp8: layouts in these dtypes, compared with one process in the same one.

Layouts round in different places. The errors of the loss and of the gradient norm, which average many values,
are bounded by the machine epsilon of the dtype. The error of a gradient, which follows from a chain of
rounded values, is bounded by four times that.

With fp8, the gradients of weights are computed in bf16, because their scales in float8 would belong to a
micro-batch. Values are then rounded to float8 in the same way in every layout, except those that differ in
bf16. A difference in float8 is 16 times as large, so all three bounds are four epsilons of bf16.
"""

from dataclasses import replace

import torch

from benchmarks.parity.parity_rows import CONTROLS, DENSE, EXPERIMENT, Column, Table

ROWS = (
    "single",
    "fsdp2",
    "hsdp",
    "fsdp2 offload",
    "fsdp2 tp2",
    "fsdp2 cp2",
    "dp2 sharded",
    "tp2 sp offload",
    "pp2vpp2",
    "cp2",
    "tp2pp2 sp",
    "pp2dp2 sharded",
)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def column(name: str, dtype: str) -> Column:
    """Return the column ``name`` of the dense table in ``dtype``."""
    plain, eps = DENSE.column(name), torch.finfo(DTYPES[dtype]).eps
    words = (*plain.overrides, f"run.dtype={dtype}")
    found = replace(plain, name=f"{dtype} {name}", overrides=words, bounds=(4 * eps, eps, eps))
    if dtype != "fp8":
        return found
    words, bounds = (*words, "parallelism.fp8_recipe=rowwise_with_gw_hp"), (4 * eps, 4 * eps, 4 * eps)
    return replace(found, overrides=words, bounds=bounds, engines=("fsdp2",), splits_matrices=False)


COLUMNS = tuple(column(name, dtype) for dtype in DTYPES for name in ("sft packed", "dpo packed"))
ROWS_OF_DENSE = tuple(map(DENSE.row, ROWS))
PRECISION = Table("precision", EXPERIMENT, ROWS_OF_DENSE, COLUMNS, CONTROLS, COLUMNS[0].name)
