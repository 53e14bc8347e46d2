"""One rank of a run: ``python -m runner.worker FOLDER``."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel (Linux) for SIGKILL when the parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["RUNNER_PARENT"]):
        sys.exit("the parent ended before this rank began")


def report(folder: Path, error: BaseException, when: float) -> None:
    """Leaves this rank's traceback, and when it failed, where the parent looks for it."""
    rank = int(os.environ["RANK"])
    facts = {"rank": rank, "time": when, "traceback": "".join(traceback.format_exception(error))}
    path = folder / "logs" / f"error_{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(path)


def main() -> None:
    """Ends with ``os._exit``: after a failure, a clean shutdown would wait for collectives that dead peers
    never join; after success, threads of the process group can abort the interpreter's own teardown.
    """
    die_with_parent()
    folder, code = Path(sys.argv[1]), 0
    try:
        from runner.train import run_rank

        run_rank(folder)
    except BaseException as error:  # noqa: BLE001  the parent prints it; nothing is swallowed
        report(folder, error, time.time())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
