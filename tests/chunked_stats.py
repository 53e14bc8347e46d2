"""Token statistics in chunks of a given size, and in blocks of two rows.

With the default sizes, a small test has only one chunk of one block.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

from components.contracts.loss import TokenStats
from components.engines.shared import generated_kernels, token_log_probs


def op_by_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``generated_kernels.compiled``: torch.compile takes seconds."""
    return function


def chunked_stats(*args: Any, chunk_size: int, fused: bool = False, **options: Any) -> TokenStats:
    with (
        mock.patch.object(token_log_probs, "CPU_ROWS", chunk_size),
        mock.patch.object(token_log_probs, "CPU_BLOCK_BYTES", 2 * 4 * len(args[1])),
        mock.patch.object(generated_kernels, "is_available", return_value=fused),
        mock.patch.object(generated_kernels, "compiled", op_by_op),
    ):
        return token_log_probs.token_stats(*args, **options)
