"""The ways a run can go wrong that a user should read about."""


class ConfigError(ValueError):
    """A mistake in what the user asked for: exit code 2, before any worker starts.

    The message is one or two lines: the option (and the file it came from, where there is one),
    what is wrong with it, and what to do.
    """


class TrainingError(RuntimeError):
    """A run that started and cannot go on: exit code 1."""


class FinalError(TrainingError):
    """One that ``run.max_restarts`` does not answer: the run would fail again, or was asked to end."""
