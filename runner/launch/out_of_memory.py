"""The advice of preflight in the error of a run that ran out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from components.contracts.errors import ConfigError, StepOutOfMemory
from components.preflight.search.memory_advice import advise_saving
from runner.launch.checks import RunPreparation, check_parts
from runner.launch.run_dir import read_run_config
from runner.launch.run_record import RunRecord


@contextmanager
def advising(launch: RunPreparation, folder: Path) -> Iterator[None]:
    """Add changes with which the run in ``folder`` needs less memory to an out-of-memory error.

    They are searched only after the error, because the search may take seconds. An evaluation gets no advice,
    because preflight estimates train steps.
    """
    try:
        yield
    except StepOutOfMemory as error:
        advice = ""
        # Memory may still be full, or a file may have been deleted. The error of the run is reported anyway.
        with suppress(ConfigError, MemoryError, OSError):
            advice = "" if launch.experiment.run.evaluate_only else advise(launch, folder)
        if not advice:
            raise
        raise StepOutOfMemory(f"{error}\n{advice}") from error


def advise(launch: RunPreparation, folder: Path) -> str:
    """Return the advice for the run in ``folder``, or "" if there is none or no forecast is made."""
    experiment = launch.experiment
    data = experiment.data.restore(RunRecord.read(folder).data)
    case = launch.candidate(check_parts(experiment), data)
    if case is None:
        return ""
    size = read_run_config(folder)["run"]["micro_batch_size"]  # that of ``auto`` may have been lowered
    return advise_saving(replace(case, micro_batch_size=size))
