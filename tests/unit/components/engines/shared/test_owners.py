"""How whole weights are given to ranks."""

from components.engines.shared.whole_weights import owners


def test_the_largest_weights_are_given_first() -> None:
    small = [(4, 10)] * 8
    assert owners([*small[:4], (4, 100), *small[4:], (4, 90)]) == [2, 3, 2, 3, 0, 2, 3, 2, 3, 1]


def test_weights_are_balanced_among_the_ranks_that_share_them() -> None:
    assert owners([(2, 5), (1, 50), (2, 5), (4, 1), (4, 1)]) == [0, 0, 1, 0, 1]
