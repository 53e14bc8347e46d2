"""No orphan, no silent success: what happens when ranks or their parent end early."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import SMALL, command, curve, newest, run_command

ROOT = Path(__file__).parents[2]
TWO = (*SMALL, "parallelism=fsdp2", "parallelism.dp=2", "run.micro_batch_size=1", "run.export=false")
FAILS = "stage._target_=tests.e2e.losses.Fails"
SECONDS_TO_END = 5


def arguments(tmp_path: Path, how: str, rank: int = 1) -> list[str]:
    options = (f"+stage.how={how}", f"+stage.rank={rank}", f"+stage.ready={tmp_path / 'ready'}")
    return command(*TWO, FAILS, *options, f"run.output_dir={tmp_path}")


def start(tmp_path: Path, how: str, *more: str) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """The command, once its rank 1 hangs in a step, and the ranks it has started."""
    process = subprocess.Popen(
        [*arguments(tmp_path, how), *more],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test runner in the background may have SIGINT ignored, which children would inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    return process, ranks


def left(ranks: list[psutil.Process], *, within: float) -> list[psutil.Process]:
    """Those that still run; what has ended and waits to be collected is not ours to collect."""
    _, alive = psutil.wait_procs(ranks, timeout=within)
    return [rank for rank in alive if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", ["rank 1 failed", "RuntimeError: the third call is a bad one", "losses.py"]),
        ("exit", ["rank 1", "SystemExit: 3"]),
        ("kill", ["rank 1 was killed by SIGKILL"]),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_own_words(tmp_path: Path, how: str, said: list[str]) -> None:
    answer = run_command(arguments(tmp_path, how), cwd=ROOT)
    ended = time.time()
    assert answer.returncode == 1
    for words in said:
        assert words in answer.stderr
    assert ended - (tmp_path / "ready").stat().st_mtime < SECONDS_TO_END


def test_a_second_signal_ends_what_a_hung_rank_holds_up(tmp_path: Path) -> None:
    process, ranks = start(tmp_path, "hang")
    assert process.stdout is not None
    guard = threading.Timer(60, process.kill)
    guard.start()
    process.send_signal(signal.SIGTERM)
    assert any("SIGTERM: the run ends when" in line for line in process.stdout), "nobody said so"
    guard.cancel()
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "nothing is left running" in said
    assert not left(ranks, within=1)
    assert time.monotonic() - sent < SECONDS_TO_END


def test_a_signal_to_the_parent_has_all_ranks_save(tmp_path: Path) -> None:
    process, ranks = start(tmp_path, "go on", "run.max_steps=100000", "run.save_every=0")
    sent = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert time.monotonic() - sent < 2 * SECONDS_TO_END
    run = newest(tmp_path)
    stopped = json.loads((run / "run.json").read_text())["stopped"]
    checkpoint = run / "checkpoints" / f"step_{stopped['step']:08d}"
    assert (checkpoint / "complete").exists()
    assert f"stopped at step {stopped['step']} (SIGUSR1); resume with: python -m runner " in said
    assert f"run.resume={checkpoint}" in said
    assert not left(ranks, within=1)


def test_a_hung_rank_is_found_with_the_stacks_of_all(tmp_path: Path) -> None:
    answer = run_command([*arguments(tmp_path, "hang"), "run.timeout=20"], cwd=ROOT)
    assert answer.returncode == 1
    assert "no progress for 20 s (run.timeout), since " in answer.stderr
    assert "in step 2" in answer.stderr
    logs = newest(tmp_path) / "logs"
    assert str(logs / "stacks_*.txt") in answer.stderr
    assert "in _fail" in (logs / "stacks_1.txt").read_text(), "the function that hangs"
    assert "in train_step" in (logs / "stacks_0.txt").read_text(), "the peer that waits for it"


def test_a_killed_rank_and_a_restart_make_the_same_curve(tmp_path: Path) -> None:
    more = ("run.max_restarts=1", "+stage.once=true", "+stage.at=7", "run.save_every=2")
    answer = run_command([*arguments(tmp_path, "kill"), *more], cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert "restart 1 of 1, from step 2: rank 1 was killed by SIGKILL" in answer.stderr
    run = newest(tmp_path)
    assert json.loads((run / "run.json").read_text())["restarts"] == 1
    once = run_command(command(*TWO, f"run.output_dir={tmp_path / 'straight'}"), cwd=ROOT)
    assert once.returncode == 0, once.stderr
    assert curve(run) == curve(newest(tmp_path / "straight"))


def test_killing_the_parent_leaves_nothing(tmp_path: Path) -> None:
    process, ranks = start(tmp_path, "hang")
    process.kill()
    process.wait()
    assert not left(ranks, within=SECONDS_TO_END)


def test_a_failure_on_one_rank_alone_has_a_traceback(tmp_path: Path) -> None:
    """The first rank runs in the user's own process."""
    single = [*SMALL, FAILS, "+stage.rank=0", f"run.output_dir={tmp_path}"]
    answer = run_command(command(*single), cwd=ROOT)
    assert answer.returncode == 1
    assert "RuntimeError: the third call is a bad one" in answer.stderr
