"""The advice of preflight in the error of a run that ran out of memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from components.contracts.errors import StepOutOfMemory
from components.json_text import one_line
from components.preflight.search.memory_advice import advise_saving
from runner.launch.checks import RunPreparation, check_parts
from runner.records.run_dir import read_run_config
from runner.records.run_record import RunRecord

log = logging.getLogger("runner")


@contextmanager
def advising(launch: RunPreparation, folder: Path) -> Iterator[None]:
    """Append changes that save memory to the error of a train step of the run that runs out of memory.

    The search for them may take seconds and starts only then. If it is interrupted or fails, for example
    because memory is still full, the original error is raised.
    """
    try:
        yield
    except StepOutOfMemory as error:
        try:
            advice = advise(launch, folder)
        except (Exception, KeyboardInterrupt) as why:  # noqa: BLE001  the run's own error is raised below
            log.debug("no changes with less memory were found: %s", one_line(why))
            advice = ""
        if not advice:
            raise
        raise StepOutOfMemory(f"{error}. {advice}") from error


def advise(launch: RunPreparation, folder: Path) -> str:
    """Return the advice for the run in ``folder``, or "" if there is none or no forecast is made."""
    experiment = launch.experiment
    data = experiment.data.restore(RunRecord.read(folder).data)
    case = launch.candidate(check_parts(experiment), data)
    if case is None:
        return ""
    size = read_run_config(folder)["run"]["micro_batch_size"]  # that of ``auto`` may have been lowered
    return advise_saving(replace(case, micro_batch_size=size))
