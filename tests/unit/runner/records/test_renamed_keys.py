"""Configs of runs before version 0.2.0."""

import pytest

from runner.records.renamed_keys import upgraded


def test_keys_of_an_older_run_get_their_present_names() -> None:
    target = "components.data.FilesData"
    sources = [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl"}]
    older = {"run": {"save_every": 5}, "data": {"_target_": target, "sources": sources}}
    assert upgraded(older) == {
        "run": {},
        "checkpoint": {"save_every": 5},
        "data": {"_target_": target, "sources": [{"path": "a.jsonl", "repeats": 2}, {"path": "b.jsonl"}]},
    }


@pytest.mark.parametrize("sources", [["a", "b"], [{"weight": 2}], None])
def test_a_data_class_of_ones_own_keeps_its_keys(sources: object) -> None:
    own = {"run": {}, "data": {"_target_": "mine.Data", "sources": sources}}
    assert upgraded(own) == own
