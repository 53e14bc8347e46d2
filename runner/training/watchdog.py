"""A watchdog that ends a run if it makes no progress for ``run.hang_timeout_s`` seconds.

Before that, it writes the stacks of all threads to a file.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from components.contracts.errors import FAILED, TrainingError
from runner.standard_streams import print_error

GRACE_S = 10.0
"""Seconds after the timeout at which faulthandler writes the stacks, if another thread holds the GIL and the
watchdog's thread cannot run.

It does not end the process, because its clock does not stop while the process is suspended."""
SLICE_S = 1.0
"""Longest wait of the watchdog's thread, in seconds. If it takes over twice as long, the process was
suspended."""


class Watchdog:
    """A thread that ends this process after ``timeout`` seconds without a ``beat``; 0 means never.

    Time in which the process is suspended, for example by Ctrl-Z, does not count. First the thread writes the
    stacks of all threads to ``folder/stacks_<rank>.txt``. With ``on_request``, for a rank that a parent or a
    launcher started, SIGQUIT makes the process write them at any time.

    Args:
        give_up: ends the process; called with the error, on the watchdog's thread.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        timeout: float,
        give_up: Callable[[TrainingError], object],
        *,
        on_request: bool,
    ) -> None:
        self.path, self.timeout, self.give_up = stacks_path(folder, rank), timeout, give_up
        self.on_request = on_request
        self.doing, self.since, self.ended = "", 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")  # appended: an earlier start of the run may have written here
        if self.on_request:
            faulthandler.register(signal.SIGQUIT, self.file)
        self.beat("at the start")
        if self.timeout:
            self.thread.start()
        return self

    def beat(self, doing: str) -> None:
        """Record progress; ``doing`` is the activity that begins, such as "in step 12"."""
        self.doing, self.since = doing, time.monotonic()
        self._arm()

    def _arm(self) -> None:
        if self.timeout:
            faulthandler.dump_traceback_later(max(self._left(), 0.0) + GRACE_S, file=self.file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.timeout:
            self.thread.join()
            faulthandler.cancel_dump_traceback_later()
        if self.on_request:
            faulthandler.unregister(signal.SIGQUIT)
        self.file.close()
        discard_if_empty(self.path)

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self.ended.wait(min(self._left(), SLICE_S)):
            now = time.monotonic()
            if now - seen > 2 * SLICE_S:
                self.since = min(self.since + now - seen, now)
                self._arm()
            seen = now
            if self._left() <= 0:
                self._give_up()
                return

    def _left(self) -> float:
        return self.since + self.timeout - time.monotonic()

    def _give_up(self) -> None:
        began = time.strftime("%H:%M:%S", time.localtime(time.time() + self.since - time.monotonic()))
        what = f"no progress for {self.timeout:g} s (run.hang_timeout_s), since {began}, {self.doing}"
        self.file.write(f"{what}\n")
        self.file.flush()
        faulthandler.dump_traceback(self.file)
        everyone = self.path.with_name("stacks_*.txt")
        self.give_up(TrainingError(f"{what}; stacks of all threads: {everyone}"))


def end_process(error: TrainingError) -> None:
    """Print ``error`` and end the process at once, from the watchdog's thread while the main thread hangs."""
    print_error(error)
    os._exit(FAILED)


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank}.txt"


def discard_if_empty(path: Path) -> None:
    if path.exists() and not path.stat().st_size:
        path.unlink()
