"""A few of the kills of ``python -m benchmarks.chaos``, on both engines."""

from pathlib import Path

import pytest

from benchmarks.chaos import measure


@pytest.mark.parametrize(("layout", "in_background"), [("fsdp2", False), ("megatron_dp2", True)])
def test_a_run_that_is_killed_ends_with_the_weights_of_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, in_background: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = measure(layout, kills=2, steps=24, seed=1, folder=tmp_path, in_background=in_background)
    assert found["bitwise"]
    assert (found["orphans"], found["unreadable"]) == (0, [])
    assert found["in_a_save"] + found["of_the_parent"] > 0, "what the seed was chosen for"
