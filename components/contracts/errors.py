"""Errors that are reported to the user, and the exit codes of every process."""

import math
from pathlib import Path

DONE, FAILED, MISTAKE = 0, 1, 2
"""Exit codes of a run that was completed or was stopped with its state saved, of one that failed while
running, and of one that was rejected before its start because of a mistake."""
INTERRUPTED = 130
"""Exit code of a run that a signal stopped without a saved state. Shells use the same code for Ctrl-C."""


class ConfigError(ValueError):
    """A mistake in the configuration, normally found before any rank starts (exit code ``MISTAKE``).

    The message is one or two lines: the option (and its file, if any), what is wrong with it, and what to do.
    """


class CompletedError(ConfigError):
    """The run to resume, in ``folder``, has no steps left."""

    same_config = False
    """Whether the run has the same config as the one that would resume it."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message, folder)  # both, so that it can be unpickled
        self.folder = folder

    def __str__(self) -> str:
        return str(self.args[0])


class TrainingError(RuntimeError):
    """A failure of a run that has started, with exit code ``FAILED``."""


class StepOutOfMemory(TrainingError):
    """A failure because a train step, or the trial step before the first one, ran out of memory."""


class NonRetryableError(TrainingError):
    """A failure that is not retried (``run.max_restarts``): it would recur, or a stop was requested."""


def check_at_least_one(node: str, config: object, *keys: str) -> None:
    """Raise ConfigError if one of the attributes ``keys`` of ``config`` is neither None nor at least 1.

    ``node`` is the name of its configuration node in the message, such as ``adapter``.
    """
    for key in keys:
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ConfigError(f"{node}.{key}: must be at least 1, got {value}.")


def check_at_least_zero(node: str, config: object, *keys: str) -> None:
    """Raise ConfigError if one of the attributes ``keys`` of ``config`` is neither None nor at least 0.

    Infinity and NaN are refused too. ``node`` is the name of its configuration node in the message.
    """
    for key in keys:
        value = getattr(config, key)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{node}.{key}: must be a number of at least 0, got {value}.")
