"""``profiler.enabled=true`` writes a trace and a table of the given steps."""

import json
from pathlib import Path

from tests.e2e.commands import SMALL, run_here


def test_a_trace_and_a_table(tmp_path: Path) -> None:
    options = ["profiler.enabled=true", "profiler.steps=[2,3]", "profiler.shapes=true", "run.export=false"]
    run = run_here(tmp_path, *SMALL, *options)
    files = sorted(path.name for path in (run / "profile").iterdir())
    assert files == ["step_2_rank_0.json", "step_2_rank_0.txt"]
    events = json.loads((run / "profile" / "step_2_rank_0.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert any("Input Dims" in event.get("args", {}) for event in events)
    table = (run / "profile" / "step_2_rank_0.txt").read_text()
    assert "aten::mm" in table
    assert "profile of steps 2 to 3" in (run / "train.log").read_text()
