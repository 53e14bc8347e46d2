"""``hydra/launcher=local`` and signals: running jobs save a checkpoint, and no process is left."""

import json
import re
import signal
from pathlib import Path

import psutil

from runner.records.job_record import JobRecord, read_job_records
from tests.e2e.commands import ROOT, SMALL, Command, left
from tests.e2e.test_workers import FAILS


def start(folder: Path, how: str, *more: str) -> Command:
    """Start a sweep of two jobs at once, whose first ranks continue or hang in the third call of the loss."""
    ready = f"+stage.ready={folder}/ready_${{hydra:runtime.choices.parallelism}}"
    swept = ("-m", *SMALL, FAILS, f"+stage.how={how}", "+stage.rank=0", ready, "run.max_steps=100000")
    launcher = ("hydra/launcher=local", "hydra.launcher.jobs=2", f"run.output_dir={folder}")
    return Command(*swept, *launcher, *more, cwd=ROOT)


def begun(folder: Path, started: Command, jobs: int) -> list[psutil.Process]:
    """Wait until ``jobs`` jobs train, and return all processes of the sweep except its parent."""
    started.until(lambda: len([*folder.glob("ready_*")]) >= jobs)
    return started.ranks()


def outcomes(folder: Path) -> list[JobRecord]:
    return read_job_records(next((folder / "sweeps").iterdir()))


def test_a_signal_has_the_jobs_that_run_save_and_no_other_begin(tmp_path: Path) -> None:
    started = start(tmp_path, "go on", "parallelism=single,fsdp2,megatron,pp2")
    processes = begun(tmp_path, started, 2)
    assert len(processes) >= 4, "two jobs, one of them with two ranks"
    started.process.send_signal(signal.SIGTERM)
    answer = started.finish()
    said = answer.stdout + answer.stderr
    assert answer.returncode == 0, said
    assert "SIGTERM: no other job begins" in said
    assert "2 jobs have not begun" in said
    found = outcomes(tmp_path)
    assert [outcome.status for outcome in found] == ["interrupted", "interrupted"]
    for outcome in found:
        run = Path(str(outcome.folder))
        step = json.loads((run / "run.json").read_text())["stopped"]["step"]
        assert (run / f"checkpoints/step_{step:08d}/complete").exists()
    assert not left(processes)


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    started = start(tmp_path, "hang", "parallelism=single")
    processes = begun(tmp_path, started, 1)
    started.process.send_signal(signal.SIGINT)
    started.until(lambda: "SIGINT: no other job begins" in started.stderr())
    started.process.send_signal(signal.SIGINT)
    answer = started.finish()
    assert answer.returncode == 130
    assert [outcome.status for outcome in outcomes(tmp_path)] == ["interrupted"]
    assert re.search(r"^ +0 +interrupted", answer.stdout + answer.stderr, re.MULTILINE), "there is a table"
    assert not left(processes)


def test_killing_the_command_leaves_nothing(tmp_path: Path) -> None:
    started = start(tmp_path, "hang", "parallelism=fsdp2")
    processes = begun(tmp_path, started, 1)
    assert len(processes) >= 3, "a job and its two ranks"
    started.process.kill()
    started.process.wait()
    assert not left(processes)
