"""Sweeps through SLURM, observed from outside."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from runner.records.job_record import JobRecord, read_job_records
from tests.e2e.commands import command
from tests.forkserver import Process, run_module
from tests.patience import patience
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]


class Sweep:
    """``python -m runner -m hydra/launcher=slurm`` in a forked process, or as a user starts it if ``typed``.

    Jobs are always new processes, which SLURM starts.
    """

    process: "subprocess.Popen[bytes] | Process"

    def __init__(self, cluster: Cluster, folder: Path, *words: str, typed: bool = False) -> None:
        self.folder, self.log = folder, folder / "launcher.log"
        folder.mkdir()
        words = ("-m", "hydra/launcher=slurm", f"run.output_dir={folder}", *words)
        environ = os.environ | cluster.environ
        with self.log.open("wb") as log, open(os.devnull) as nothing:
            if typed:
                self.process = subprocess.Popen(
                    command(*words), cwd=ROOT, env=environ, stdin=nothing, stdout=log, stderr=log
                )
            else:
                streams = (nothing.fileno(), log.fileno(), log.fileno())
                self.process = Process(
                    run_module, "runner", *words, streams=streams, environ=environ, cwd=ROOT
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text()

    def outcomes(self) -> list[JobRecord]:
        return [record for sweep in self.folder.glob("sweeps/*") for record in read_job_records(sweep)]

    def id_of(self, number: int) -> str:
        """Wait for the SLURM id of a job and return it."""
        self.until(lambda: f"job {number} (SLURM " in self.said())
        found = re.search(rf"job {number} \(SLURM (\S+)\)", self.said())
        assert found is not None
        return found[1]

    def steps_of(self, number: int) -> int:
        """Return the number of rows that a job has logged so far."""
        folders = [record.folder for record in self.outcomes() if record.number == number]
        path = Path(str(folders[0]), "metrics.jsonl") if folders else Path("nowhere")
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until(self, true: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + patience(seconds)
        while not true():
            assert self.process.poll() is None, self.everything()
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.2)

    def end(self, seconds: float = 100) -> int:
        try:
            return self.process.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            pytest.fail(self.everything())

    def everything(self) -> str:
        logs = sorted(self.folder.glob("sweeps/*/slurm/*_log.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in (self.log, *logs))
