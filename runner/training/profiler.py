"""Profiles of a few steps: ``profiler.enabled=true``."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from runner.config.run_config import ProfilerConfig

log = logging.getLogger("runner")

ROWS = 60
"""Maximum number of operators in the table, the most expensive first."""


class Profiler:
    """A recorder of the steps ``profiler.steps`` of this process, if its rank is in ``profiler.ranks``.

    It writes ``step_S_rank_R.json``, a Chrome trace (chrome://tracing, https://ui.perfetto.dev), and a table
    of operators, ``step_S_rank_R.txt``, to ``folder``; S is the number of the first recorded step in the run.
    """

    def __init__(self, profiler: ProfilerConfig, folder: Path, rank: int, device: torch.device) -> None:
        self.folder, self.rank, self.device = folder, rank, device
        self.first, self.last = profiler.steps
        self.steps, self.recorder = 0, None
        self.recorded_from: int | None = None
        """The first recorded step. None means that recording has not begun."""
        if profiler.enabled and rank in profiler.ranks:
            self.recorder = profile(
                activities={ProfilerActivity.CPU} if device.type == "cpu" else supported_activities(),
                record_shapes=profiler.shapes,
                profile_memory=profiler.memory,
                with_stack=profiler.stacks,
            )

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step that runs in the context, if it is one of ``profiler.steps``.

        ``number`` (from 1) counts from the first step of the run and names the files, but ``profiler.steps``
        count from the first step of this process.
        """
        self.steps += 1
        if self.recorder is not None and self.steps == self.first:
            self.recorder.start()
            self.recorded_from = number
        yield
        if self.steps == self.last:
            self.finish(number)

    def finish(self, last: int) -> None:
        """Stop the recording, if it is running, and write it; ``last`` is the number of its last step.

        A run may end before the last of ``profiler.steps``; a resumed one may even end before the first, and
        nothing is recorded. A recording that is not stopped can crash the process at exit.
        """
        if self.recorder is None:
            return
        if self.recorded_from is None:
            log.warning(
                "no profile: this process took %d steps, and profiler.steps begin at %d",
                self.steps,
                self.first,
            )
            return
        self.recorder.stop()
        try:
            self.write(self.recorder, self.recorded_from, last)
        except OSError as error:
            log.warning("%s: the profile could not be written: %s", self.folder, error)
        self.recorder = None

    def write(self, recorder: profile, first: int, last: int) -> None:
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"step_{first}_rank_{self.rank}.json"
        recorder.export_chrome_trace(str(trace))
        averages = recorder.key_averages(group_by_input_shape=bool(recorder.record_shapes))
        table = averages.table(sort_by=f"self_{self.device.type}_time_total", row_limit=ROWS)
        trace.with_suffix(".txt").write_text(table)
        log.info(f"profile of steps {first} to {last}: {trace}")
