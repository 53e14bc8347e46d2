"""The interface of tokenised data, and the types of its arrays."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TokenSequences(Protocol):
    """Sequences of tokens. Sample ``i`` is sequence ``i``, or sequences ``2 * i`` and ``2 * i + 1``.

    The two sequences are the chosen and the rejected one of a pair or, in unpaired data, the prompt with its
    own answer and the prompt with the answer of another record.
    """

    @property
    def sequences_per_sample(self) -> int: ...

    @property
    def desirable(self) -> Bools | None:
        """Whether each sample of unpaired data is desirable, bool. None means other data."""

    @property
    def margins(self) -> Floats | None:
        """Margin of each sample of ranked data, float64. None means other data."""

    @property
    def lengths(self) -> Ints:
        """int64 ``[S]``: the number of tokens of each sequence."""

    def tokens(self, sequence: int, start: int, stop: int) -> Array:
        """Return token ids ``start`` to ``stop - 1`` of a sequence, in the dtype of the file.

        The result is shorter if ``stop`` is beyond the end of the sequence.
        """

    def mask(self, sequence: int, start: int, stop: int) -> Bools:
        """Return which of the tokens ``start`` to ``stop - 1`` are targets of the loss, bool ``[n]``.

        The result is shorter if ``stop`` is beyond the end of the sequence.
        """

    def origin(self, sample: int) -> str:
        """Return the source of the sample and the number of its record, from 1: ``data.train:17``."""
