"""The parent collects the stack traces of its running ranks."""

import subprocess
import sys
from pathlib import Path

from runner.launch.spawn import ask_for_stacks
from runner.training.watchdog import stacks_path

BUSY = """
import sys
from pathlib import Path
from runner.training.watchdog import Watchdog
def turns_round_and_round():
    print("begun", flush=True)
    while True:
        pass
with Watchdog(Path(sys.argv[1]), 1, 60, print, on_request=True):
    turns_round_and_round()
"""


def test_of_those_that_run_even_where_they_never_pause(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(logs)], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"begun\n"
        ask_for_stacks(tmp_path, [ended, busy])
        assert "in turns_round_and_round" in stacks_path(logs, 1).read_text()
        assert not stacks_path(logs, 0).exists()
    finally:
        busy.kill()
        busy.communicate()
