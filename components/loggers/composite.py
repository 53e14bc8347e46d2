"""The logger that passes every row to each of several loggers."""

import logging
from collections.abc import Callable, Mapping, Sequence

from components.loggers.base import Logger, LoggerSpec, Row, RunInfo, RunResult

log = logging.getLogger(__name__)


class CompositeLogger:
    """The loggers of a run, by name. A logger that fails is reported and removed, and the run continues."""

    def __init__(self, specs: Mapping[str, LoggerSpec], start: RunInfo) -> None:
        self._open: dict[str, Logger] = {}
        for name, spec in specs.items():
            try:
                logger = spec.open(start)
            except Exception as error:  # noqa: BLE001  a tracker may raise anything
                warn(name, error)
            else:
                if logger is not None:
                    self._open[name] = logger

    def log(self, row: Row) -> None:
        self._each(lambda logger: logger.log(row))

    def log_table(self, name: str, rows: Sequence[Mapping[str, str]], step: int) -> None:
        self._each(lambda logger: logger.log_table(name, rows, step))

    def finish(self, ending: RunResult) -> None:
        self._each(lambda logger: logger.finish(ending))
        self._open = {}

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001  a tracker may raise anything
                warn(name, error)
                del self._open[name]


def warn(name: str, error: Exception) -> None:
    reason = " ".join(str(error).split())
    log.warning(f"logger={name} failed and is left out from here on: {type(error).__name__}: {reason}")
