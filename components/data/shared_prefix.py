"""The number of prompt tokens that the two sequences of a pair share and that are computed only once."""

import numpy as np

from components.data.store.token_sequences import Ints, TokenSequences


def shared_lengths(store: TokenSequences) -> Ints:
    """Return the number of prompt tokens of each pair that are computed only in the chosen sequence, int64.

    These are the leading tokens that are the same in both sequences and targets in neither, except the last
    of them: it is computed in both, because it predicts the first token of the answer. The number is 0 if no
    other token is shared.
    """
    assert store.sequences_per_sample == 2, "prompts are shared within pairs"
    return np.array([_shared(store, pair) for pair in range(len(store.lengths) // 2)], np.int64)


def _shared(store: TokenSequences, pair: int) -> int:
    chosen, rejected = 2 * pair, 2 * pair + 1
    length = int(store.lengths[[chosen, rejected]].min())
    same = store.tokens(chosen, 0, length) == store.tokens(rejected, 0, length)
    untrained = ~(store.mask(chosen, 0, length) | store.mask(rejected, 0, length))
    common = np.append(same & untrained, False).argmin()  # the first token that differs or is a target
    return max(int(common) - 1, 0)
