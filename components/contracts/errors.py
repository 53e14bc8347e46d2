"""The ways a run can go wrong that a user should read about, and the exit codes of every process."""

DONE, FAILED, MISTAKE = 0, 1, 2
"""Done, or stopped with its state saved; failed while running; a mistake that was found before that."""
INTERRUPTED = 130
"""By a signal, with nothing saved: as shells have it for Ctrl-C."""


class ConfigError(ValueError):
    """A mistake in what the user asked for: exit code ``MISTAKE``, before any worker starts.

    The message is one or two lines: the option (and the file it came from, where there is one),
    what is wrong with it, and what to do.
    """


class TrainingError(RuntimeError):
    """A run that started and cannot go on: exit code ``FAILED``."""


class NonRetryableError(TrainingError):
    """One that ``run.max_restarts`` does not answer: the run would fail again, or was asked to end."""
