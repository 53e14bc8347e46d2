"""One rank of a run, or of a proof: ``python -m runner.launch.rank_main FOLDER SEARCH_PATH ...``."""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import DONE, FAILED, TrainingError
from runner.garbage_collection import collect_rarely
from runner.records.failures import report_failure
from runner.search_path import follow_parent
from runner.signals import REQUESTS, die_with_parent
from runner.standard_streams import print_error, survive_closed_streams


def expect_signals() -> None:
    """Let every stop signal end this process until it has state to save.

    The parent learns the signal from the exit code. SIGQUIT is ignored until there is a file for stacks.
    """
    for number in REQUESTS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # writes stacks once there is a file for them


def main() -> None:
    """Run one rank and end with ``os._exit``.

    After a failure, a normal exit would wait for collectives that failed ranks never join. After success,
    threads of the process group can abort the interpreter's shutdown.
    """
    collect_rarely()
    die_with_parent()
    expect_signals()
    survive_closed_streams()
    follow_parent(sys.argv[2:])
    folder, code = Path(sys.argv[1]), DONE

    def give_up(error: TrainingError) -> None:
        try:
            report_failure(folder, error, stalled=True)
        finally:
            exit_process(FAILED)

    try:
        if (folder / "proof.json").exists():
            from runner.training.proof_rank import prove_rank

            prove_rank(folder, give_up)
        else:
            from runner.training.rank import run_rank

            run_rank(folder, give_up)
    except BaseException as error:  # noqa: BLE001  the parent prints it; nothing is swallowed
        code = FAILED
        try:
            report_failure(folder, error)
        except OSError:  # the failure may be that this disk is full
            if isinstance(error, TrainingError):
                print_error(error)
            else:
                traceback.print_exception(error)
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
