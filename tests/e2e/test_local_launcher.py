"""``hydra/launcher=local`` and signals: what runs saves, and nothing is left."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil

from runner.jobs import GRACE_S
from runner.outcome import Outcome, read_outcomes
from tests.e2e.commands import SMALL, command
from tests.e2e.test_workers import FAILS, ROOT, SECONDS_TO_END, left


def start(folder: Path, how: str, *more: str) -> "subprocess.Popen[str]":
    """A sweep, two at once, the first rank of each of which goes on, or hangs, in its third call."""
    ready = f"+stage.ready={folder}/ready_${{hydra:runtime.choices.parallelism}}"
    swept = ("-m", *SMALL, FAILS, f"+stage.how={how}", "+stage.rank=0", ready, "run.max_steps=100000")
    launcher = ("hydra/launcher=local", "hydra.launcher.jobs=2", f"run.output_dir={folder}")
    return subprocess.Popen(
        command(*swept, *launcher, *more),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test runner in the background may have SIGINT ignored, which children would inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def begun(folder: Path, process: "subprocess.Popen[str]", jobs: int) -> list[psutil.Process]:
    """Every process of the sweep but its parent, once ``jobs`` of them train."""
    deadline = time.monotonic() + 180
    while len([*folder.glob("ready_*")]) < jobs:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


def outcomes(folder: Path) -> list[Outcome]:
    return read_outcomes(next((folder / "sweeps").iterdir()))


def test_a_signal_has_the_jobs_that_run_save_and_no_other_begin(tmp_path: Path) -> None:
    process = start(tmp_path, "go on", "parallelism=single,fsdp2,megatron,pp2")
    processes = begun(tmp_path, process, 2)
    assert len(processes) >= 4, "two jobs, one of them with two ranks"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "SIGTERM: no other job begins" in said
    assert "2 jobs have not begun" in said
    found = outcomes(tmp_path)
    assert [outcome.status for outcome in found] == ["stopped", "stopped"]
    for outcome in found:
        run = Path(str(outcome.folder))
        step = json.loads((run / "run.json").read_text())["stopped"]["step"]
        assert (run / f"checkpoints/step_{step:08d}/complete").exists()
    assert not left(processes, within=1)


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "hang", "parallelism=single")
    processes = begun(tmp_path, process, 1)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert any("SIGINT: no other job begins" in line for line in process.stdout)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - sent < GRACE_S + SECONDS_TO_END
    assert process.returncode == 130
    assert [outcome.status for outcome in outcomes(tmp_path)] == ["stopped"]
    assert re.search(r"^ +0 +stopped", said, re.MULTILINE), "there is a table"
    assert not left(processes, within=1)


def test_killing_the_command_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "hang", "parallelism=fsdp2")
    processes = begun(tmp_path, process, 1)
    assert len(processes) >= 3, "a job and its two ranks"
    process.kill()
    process.wait()
    assert not left(processes, within=SECONDS_TO_END)
