"""Output streams that survive a closed pipe or a full disk, and the form of errors on them."""

import io
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

from typing_extensions import Buffer

log = logging.getLogger("runner")


class LossyFile(io.FileIO):
    """A file that discards data that cannot be written, and calls ``report`` with the first error."""

    def __init__(self, file: str | int, mode: str, report: Callable[[OSError], object]) -> None:
        super().__init__(file, mode, closefd=isinstance(file, str))
        self.report: Callable[[OSError], object] | None = report

    def write(self, data: Buffer, /) -> int:
        """Write ``data``; if that fails, return its length in bytes as if it had been written."""
        try:
            return super().write(data)
        except OSError as error:
            report, self.report = self.report, None
            if report is not None:
                report(error)
            return memoryview(data).nbytes


def lossy_text(
    file: str | int, mode: str, report: Callable[[OSError], object], encoding: str = "utf-8"
) -> TextIO:
    """Open a ``LossyFile`` as a text file that writes every line at once."""
    buffered = io.BufferedWriter(LossyFile(file, mode, report))
    return io.TextIOWrapper(buffered, encoding=encoding, errors="backslashreplace", line_buffering=True)


def survive_closed_streams() -> None:
    """Replace stdout and stderr by a ``LossyFile`` each, with which a run continues without their reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # None means that it was closed when the process started
            report = partial(report_lost_stream, name)
            setattr(sys, name, lossy_text(stream.fileno(), "w", report, stream.encoding))


def print_error(error: object) -> None:
    """Print ``error: MESSAGE`` on stderr at once, on a terminal with a red first word.

    As usual, a value of NO_COLOR, or TERM=dumb, turns the colour off.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    plain = not terminal or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    print("error:" if plain else "\x1b[1;31merror:\x1b[0m", error, file=sys.stderr, flush=True)


def report_lost_stream(name: str, error: OSError) -> None:
    """Log a warning that the stream ``name`` cannot be written.

    The log file may be the only output that is left.
    """
    log.warning("%s cannot be written (%s); the run continues, see its train.log", name, error.strerror)
