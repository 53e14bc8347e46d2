"""The watchdog in this process: the handler that it calls and the file that it writes."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.contracts.errors import TrainingError
from runner.training.watchdog import Watchdog
from tests.patience import patience


def hangs_in_here(ended: threading.Event) -> None:
    assert ended.wait(patience(15)), "the watchdog never spoke"


def test_it_says_where_every_thread_is(tmp_path: Path) -> None:
    said: list[TrainingError] = []
    ended = threading.Event()

    def give_up(error: TrainingError) -> None:
        said.append(error)
        ended.set()

    with Watchdog(tmp_path, 3, 0.2, give_up, on_request=False) as watchdog:
        watchdog.beat("in step 12")
        hangs_in_here(ended)
    stacks = (tmp_path / "stacks_3.txt").read_text()
    assert "hangs_in_here" in stacks
    assert "_watch" in stacks, "of every thread"
    (message,) = map(str, said)
    assert "no progress for 0.2 s (run.hang_timeout_s), since " in message
    assert "in step 12" in message
    assert str(tmp_path / "stacks_*.txt") in message


def test_progress_keeps_it_quiet_and_leaves_no_file(tmp_path: Path) -> None:
    with Watchdog(tmp_path, 0, 600, pytest.fail, on_request=False) as watchdog:
        watchdog.since -= 500
        watchdog.beat("in step 2")
        assert watchdog._left() > 500
    assert list(tmp_path.iterdir()) == []


SUSPENDED = """
import sys
from pathlib import Path
from runner.training import watchdog

watchdog.GRACE_S, watchdog.SLICE_S = 0.1, 0.1
said = []
with watchdog.Watchdog(Path(sys.argv[1]), 0, float(sys.argv[2]), said.append, on_request=False) as found:
    print("ready", flush=True)
    sys.stdin.readline()
    found.thread.join(0.3)
print(said)
"""


def test_a_suspended_process_continues(tmp_path: Path) -> None:
    """Neither the watchdog's thread nor faulthandler ends it when it continues."""
    limit = patience(1)
    command = [sys.executable, "-c", SUSPENDED, str(tmp_path), str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(limit + 0.5)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go on\n")
    assert said == "[]\n"
    assert process.returncode == 0


def test_zero_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", pytest.fail)
    with Watchdog(tmp_path, 0, 0, pytest.fail, on_request=False) as watchdog:
        watchdog.beat("in step 1")
        assert not watchdog.thread.is_alive()


def test_the_parent_may_ask(tmp_path: Path) -> None:
    with Watchdog(tmp_path, 1, 60, pytest.fail, on_request=True):
        os.kill(os.getpid(), signal.SIGQUIT)
        assert "test_the_parent_may_ask" in (tmp_path / "stacks_1.txt").read_text()
