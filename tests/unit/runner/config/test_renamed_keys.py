"""Configs of runs before version 0.2.0."""

from runner.config.renamed_keys import upgraded


def test_keys_of_an_older_run_get_their_present_names() -> None:
    older = {"run": {"save_every": 5}, "data": {"sources": [{"path": "a.jsonl", "weight": 2}]}}
    assert upgraded(older) == {
        "run": {},
        "checkpoint": {"save_every": 5},
        "data": {"sources": [{"path": "a.jsonl", "repeats": 2}]},
    }
