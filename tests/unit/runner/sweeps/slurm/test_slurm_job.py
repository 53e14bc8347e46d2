"""Exit code, record and environment of one job of a sweep on each of its ranks."""

import math
import os
from pathlib import Path

import pytest

from components.contracts.errors import ConfigError, TrainingError
from runner.config.sources import ConfigSources
from runner.records.job_record import SWEEP_FOLDER, SweepJob, read_job_record
from runner.sweeps.slurm import job
from runner.sweeps.slurm.job import SlurmJob


@pytest.mark.parametrize("rank", [None, "0", "1"])
@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        (None, 0, "completed"),
        (TrainingError("no"), 1, "failed"),
        (ConfigError("run.x: no"), 2, "invalid"),
        (SystemExit(0), 0, "interrupted"),
        (KeyboardInterrupt("SIGTERM"), 130, "interrupted"),
    ],
)
def test_a_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: str | None,
    end: BaseException | None,
    code: int,
    status: str,
) -> None:
    """Only rank 0, or the only task, writes the record of the job."""
    environ = dict(os.environ) if rank is None else os.environ | {"RANK": rank}
    monkeypatch.setattr(os, "environ", environ)
    left: list[int] = []
    monkeypatch.setattr(job, "exit_process", left.append)

    def run(*_: object) -> float:
        assert (os.environ[SWEEP_FOLDER], os.environ["COLOUR"]) == (str(tmp_path), "red")
        if end is not None:
            raise end
        return math.pi

    monkeypatch.setattr("runner.launch.run.run", run)
    where = ConfigSources(sweep_job=SweepJob(tmp_path, 3, ("run.seed=3",)))
    SlurmJob({}, where, ("runner", "-m"), {"COLOUR": "red"})()
    assert left == [code]
    path = tmp_path / "jobs" / "3.json"
    assert path.exists() == (rank != "1")
    if rank != "1":
        outcome = read_job_record(path)
        assert (outcome.status, outcome.loss) == (status, math.pi if end is None else None)
