"""Token statistics in chunks of a given size. With the default size, a small test has only one chunk."""

from typing import Any
from unittest import mock

from components.contracts.loss import TokenStats
from components.engines.shared import token_log_probs


def chunked_stats(*args: Any, chunk_size: int, **options: Any) -> TokenStats:
    with mock.patch.object(token_log_probs, "CPU_ROWS", chunk_size):
        return token_log_probs.token_stats(*args, **options)
