"""When a checkpoint counts, and how many are kept."""

import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from components.checkpoint.folder import (
    MARKER,
    CheckpointMeta,
    RunIdentity,
    commit,
    complete_checkpoints,
    is_complete,
    step_folder,
)
from runner.protocols import Engine

log = logging.getLogger(__name__)


class State(Protocol):
    """A dataclass of counters; ``step`` names the folder."""

    step: int


@dataclass(frozen=True)
class CheckpointPolicy:
    """Writes ``folder/step_XXXXXXXX``, whole or not at all, and keeps the newest ``keep_last`` (0: all)."""

    folder: Path
    identity: RunIdentity
    keep_last: int
    model_only: bool
    writes: bool
    """On one rank: it makes and removes folders, and marks what is complete."""

    def save(self, engine: Engine, state: State) -> Path:
        """Every rank calls it together."""
        target = step_folder(self.folder, state.step)
        if self.writes:
            remove(target)  # left behind by a run that was killed here
            target.mkdir(parents=True)
        engine.barrier()  # nobody writes before the folder is clean
        engine.save(target, model_only=self.model_only)
        engine.barrier()  # everybody has written
        if self.writes:
            commit(target, CheckpointMeta(vars(state).copy(), asdict(self.identity), self.model_only))
            log.info("step %d  saved %s", state.step, target)
            self._prune()
        return target

    def _prune(self) -> None:
        """Removes what is complete and old; an incomplete folder older than the newest is of no use."""
        complete = complete_checkpoints(self.folder)
        torn = [f for f in self.folder.glob("step_*") if not is_complete(f) and f < complete[-1]]
        for old in torn + (complete[: -self.keep_last] if self.keep_last else []):
            remove(old)


def remove(checkpoint: Path) -> None:
    """The marker goes first: killed half-way, this must not leave what looks like a whole checkpoint."""
    if checkpoint.exists():
        (checkpoint / MARKER).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)
