"""Which pairs continue the same prompt, and how much of it need not be computed twice."""

import numpy as np

from components.data.store.token_store import Ints, TokenSequences


def shared_lengths(store: TokenSequences) -> Ints:
    """int64, per pair of ``store``: so many first tokens of the rejected sequence are left to the chosen one.

    All that both begin with and neither has as a target, but for its last token: that one predicts the first
    token of its own answer, so both compute it. 0 where there is no more than that.
    """
    assert store.sequences_per_sample == 2, "prompts are shared within pairs"
    return np.array([_shared(store, pair) for pair in range(len(store.lengths) // 2)], np.int64)


def _shared(store: TokenSequences, pair: int) -> int:
    chosen, rejected = 2 * pair, 2 * pair + 1
    length = int(store.lengths[[chosen, rejected]].min())
    same = store.tokens(chosen, 0, length) == store.tokens(rejected, 0, length)
    untrained = ~(store.mask(chosen, 0, length) | store.mask(rejected, 0, length))
    common = np.append(same & untrained, False).argmin()  # the first token that is not
    return max(int(common) - 1, 0)
