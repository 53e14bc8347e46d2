"""A few of the kills of ``python -m benchmarks.fault_injection`` on both engines."""

import json
from pathlib import Path

import pytest

from benchmarks.fault_injection import measure
from tests.e2e.commands import ROOT, Command


def kill_twice(layout: str, folder: str, *in_background: str) -> None:
    found = measure(layout, kills=2, steps=24, seed=1, folder=Path(folder), in_background=bool(in_background))
    Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize("options", [("fsdp2",), ("megatron_dp2", "in_background")], ids=lambda o: o[0])
def test_a_run_that_is_killed_ends_with_the_weights_of_one_left_alone(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    layout, *in_background = options
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    started = Command(layout, str(tmp_path), *in_background, cwd=ROOT, environ=no_gpu, call=kill_twice)
    answer = started.finish(120)
    assert answer.returncode == 0, answer.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bitwise"]
    assert (found["orphans"], found["unreadable"]) == (0, [])
    assert found["in_a_save"] + found["of_the_parent"] > 0, "what the seed was chosen for"
