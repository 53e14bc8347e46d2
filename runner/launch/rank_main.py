"""One rank of a run: ``python -m runner.launch.rank_main FOLDER``."""

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import DONE, FAILED, TrainingError
from runner.launch.failures import report_failure
from runner.launch.signals import REQUESTS

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel (Linux) for SIGKILL when the parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["RUNNER_PARENT"]):
        sys.exit("the parent ended before this rank began")


def expect_signals() -> None:
    """Until there is something to save, a request ends this process, and the parent sees by which it was."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # asks for stacks, once there is a file for them


def main() -> None:
    """Ends with ``os._exit``: after a failure, a clean shutdown would wait for collectives that dead peers
    never join; after success, threads of the process group can abort the interpreter's own teardown.
    """
    die_with_parent()
    expect_signals()
    folder, code = Path(sys.argv[1]), DONE

    def give_up(error: TrainingError) -> None:
        try:
            report_failure(folder, error, stalled=True)
        finally:
            exit_process(FAILED)

    try:
        from runner.training.rank import run_rank

        run_rank(folder, give_up)
    except BaseException as error:  # noqa: BLE001  the parent prints it; nothing is swallowed
        code = FAILED
        try:
            report_failure(folder, error)
        except OSError:  # the disk that is full may be the run's own
            traceback.print_exception(error)
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
