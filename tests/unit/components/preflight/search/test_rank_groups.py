"""The rank groups of large layouts equal hand-written ones."""

from components.preflight.search.rank_groups import group_lines, group_rows, groups
from tests.distributed.cases import fsdp2, megatron


def test_groups_of_512_ranks() -> None:
    found = groups(megatron(tp=8, pp=4, dp=16), 512)
    assert list(found) == ["pp", "dp", "tp"]
    assert [len(each) for each in found.values()] == [128, 32, 64]
    assert found["tp"][1] == list(range(8, 16))
    assert found["dp"][0] == list(range(0, 128, 8))
    assert found["pp"][0] == [0, 128, 256, 384]
    for each in found.values():
        assert sorted(rank for ranks in each for rank in ranks) == list(range(512))


def test_ranks_that_split_sequences_share_weights_too() -> None:
    found = groups(fsdp2(4, dp_replicate=2, cp=2, tp=2), 16)
    assert found["dp_replicate"][0] == [0, 8]
    assert found["dp_shard"][0] == [0, 4]
    assert found["cp"][0] == [0, 2]
    assert found["dp_shard x cp"][0] == [0, 2, 4, 6]
    assert groups(fsdp2(1, cp=2), 2)["dp_shard x cp"] == [[0, 1]]


def test_ranks_with_the_same_experts() -> None:
    found = groups(megatron(tp=2, dp=4, ep=2), 8)
    assert found["ep"][0] == [0, 1]
    assert found["dp of experts"][0] == [0, 2, 4, 6]
    assert groups(fsdp2(4, ep=2), 4)["dp_shard of experts"] == [[0, 2], [1, 3]]


def test_groups_in_words() -> None:
    lines = group_lines(megatron(tp=8, pp=4, dp=16), 512)
    assert lines == [
        "pp 4: 0 128 .. 384, ..., 127 255 .. 511",
        "dp 16: 0 8 .. 120, ..., 391 399 .. 511",
        "tp 8: 0-7, ..., 504-511",
    ]
    assert group_lines(fsdp2(1), 1) == []
    assert group_lines(fsdp2(2), 2) == ["dp_shard 2: 0 1"]
    rows = group_rows(fsdp2(2, tp=2), 4)
    assert rows[0] == {"dimension": "dp_shard", "group": 0, "size": 2, "ranks": "0 2"}
