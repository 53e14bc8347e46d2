"""Twelve jobs, one after another in one process, and two at a time in separate processes."""

import json
import math
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from tests.e2e.commands import call_here, curve, run_here
from tests.e2e.twelve_jobs import POINTS, SWEEP, SWEPT, check_outcomes, check_table


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=local", "hydra.launcher.jobs=2")], ids=len)
def test_twelve_jobs(tmp_path: Path, capfd: pytest.CaptureFixture[str], launcher: tuple[str, ...]) -> None:
    GlobalHydra.instance().clear()
    assert call_here("-m", f"run.output_dir={tmp_path}", *SWEEP, *launcher) == 1
    shown = capfd.readouterr()
    (sweep,) = (tmp_path / "sweeps").iterdir()
    outcomes = check_outcomes(sweep)
    check_table(shown.out)
    assert "RuntimeError: this rank does not like 3e-3" in shown.err
    facts = json.loads((sweep / "sweep.json").read_text())
    assert facts["counts"] == {"completed": 9, "invalid": 2, "failed": 1}
    assert (facts["jobs"], facts["exit_code"]) == (12, 1)
    if not launcher:  # all in one process, whose first job ran before Megatron
        alone = run_here(tmp_path / "alone", *(word for word in SWEEP if word not in SWEPT), *POINTS[0])
        assert curve(alone) == curve(Path(str(outcomes[0].folder)))
    lowest = min(outcomes, key=lambda outcome: math.inf if outcome.loss is None else outcome.loss)
    assert facts["best"] == yaml.safe_load((sweep / "best.yaml").read_text())["job"] == lowest.number
