"""Mixtures of sources by shares: how often an epoch contains the samples of each source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]


@dataclass(frozen=True)
class Shares:
    """The share of each source in an epoch: positive numbers with any sum, as in Megatron."""

    values: Sequence[float]
    stopping_strategy: StoppingStrategy
    """Whether an epoch ends when the first or the last source is exhausted, as in ``interleave_datasets``."""

    def repeats(self, sizes: Sequence[int]) -> list[float]:
        """Return how often an epoch contains each source, given the numbers of their samples or tokens."""
        assert all(sizes), "a source without samples is refused before"
        passes = [share / size for share, size in zip(self.values, sizes, strict=True)]
        read_once = max(passes) if self.stopping_strategy == "first_exhausted" else min(passes)
        # Rounded, so that a result that differs from 2 only by floating-point error becomes exactly 2.
        return [round(each / read_once, 9) for each in passes]


def parse_blend(option: str, text: str) -> list[Json]:
    """Return the sources of a line such as ``0.7 A 0.3 B``, the format of Megatron's ``--data-path``.

    Raises:
        ConfigError: if ``text`` is not an alternation of shares and paths.
    """
    words = text.split()
    try:
        shares = [float(word) for word in words[::2]]
    except ValueError:
        shares = []
    if not shares or len(words) % 2:
        raise ConfigError(
            f"{option}: {text!r} is not a line of shares and paths; use '0.7 a.jsonl 0.3 b.jsonl'."
        )
    return [{"path": path, "share": share} for path, share in zip(words[1::2], shares, strict=True)]
