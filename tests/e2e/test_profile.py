"""``profiler.enabled=true`` writes a trace and a table of the given steps."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, call_here, run_here


def test_a_run_that_goes_on_for_fewer_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command finishes the run, and says that nothing is recorded."""
    saves = ("run.export=false", "checkpoint.save_every=2", f"run.output_dir={tmp_path}")
    profiles = (*saves, "profiler.enabled=true", "profiler.steps=[3,4]")
    run = run_here(tmp_path, *SMALL, *saves)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"ended": "interrupted"}))
    assert call_here(*SMALL, *profiles, "checkpoint.resume=auto") == 0
    assert "no profile: this process took 2 steps, and profiler.steps begin at 3" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_trace_and_a_table(tmp_path: Path) -> None:
    options = ["debug=profiler", "profiler.steps=[2,3]"]
    run = run_here(tmp_path, *SMALL, *options)
    files = sorted(path.name for path in (run / "profile").iterdir())
    assert files == ["step_2_rank_0.json", "step_2_rank_0.txt"]
    events = json.loads((run / "profile" / "step_2_rank_0.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert any("Input Dims" in event.get("args", {}) for event in events)
    table = (run / "profile" / "step_2_rank_0.txt").read_text()
    assert "aten::mm" in names
    assert "aten::" in table  # on a busy machine, any operators may be the most expensive ones
    assert "profile of steps 2 to 3" in (run / "train.log").read_text()
