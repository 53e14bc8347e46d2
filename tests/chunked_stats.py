"""Token statistics in chunks of a given size, and in blocks of two rows.

With the default sizes, a small test has only one chunk of one block.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

from components.contracts.loss import TokenStats
from components.engines.shared import fused_softmax, token_log_probs


def op_by_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``fused_softmax.compiled``: the same functions without torch.compile, which takes seconds."""
    return function


def chunked_stats(*args: Any, chunk_size: int, fused: bool = False, **options: Any) -> TokenStats:
    with (
        mock.patch.object(token_log_probs, "CPU_ROWS", chunk_size),
        mock.patch.object(token_log_probs, "CPU_BLOCK_BYTES", 2 * 4 * len(args[1])),
        mock.patch.object(fused_softmax, "is_available", return_value=fused),
        mock.patch.object(fused_softmax, "compiled", op_by_op),
    ):
        return token_log_probs.token_stats(*args, **options)
