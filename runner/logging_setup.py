"""Console and log file of a run."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from runner.standard_streams import lossy_text

log = logging.getLogger("runner")


class ConsoleHandler(logging.Handler):
    """A handler that prints through rich, which keeps a progress bar below the log lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)


def report_lost(path: Path, error: OSError) -> None:
    print(f"{path}: cannot be written: {error.strerror}; the run continues without it", file=sys.stderr)


@contextlib.contextmanager
def log_to(path: Path | None, console: Console | None) -> Iterator[None]:
    """Send the ``runner`` and ``components`` loggers to ``console`` and ``path`` while the context is open.

    For a quiet ``console``, only warnings are printed, on stderr. If writing to ``path`` fails, a message is
    printed once on stderr and the program continues.
    """
    handlers: list[logging.Handler] = []
    if console is not None:
        handlers.append(ConsoleHandler(Console(stderr=True) if console.quiet else console))
        handlers[0].setLevel(logging.WARNING if console.quiet else logging.INFO)
    if path is not None:
        handlers.append(logging.StreamHandler(lossy_text(str(path), "a", partial(report_lost, path))))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    loggers = [log, logging.getLogger("components")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()
            if isinstance(handler, logging.StreamHandler):
                handler.stream.close()
