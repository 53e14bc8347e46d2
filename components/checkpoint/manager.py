"""When a checkpoint counts, how many are kept, and what a save that fails means."""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import torch.distributed as dist
from torch import Tensor

from components.checkpoint.async_save import RUNNING, AsyncSaver
from components.checkpoint.dcp import all_gather_objects, save_tensors
from components.checkpoint.folder import CheckpointMeta, commit, create_dir, discard, prune, step_folder
from components.checkpoint.resume import RunIdentity
from components.contracts.engine import Engine
from components.contracts.errors import TrainingError

log = logging.getLogger(__name__)


class State(Protocol):
    """A dataclass of counters; ``step`` names the folder."""

    step: int


@dataclass
class CheckpointManager:
    """Writes ``folder/step_XXXXXXXX``, whole or not at all, and keeps the newest ``keep_last`` (0: all).

    Every rank makes it together and calls every method together. ``folder`` may be on a filesystem that all
    nodes share, or have the same path on a disk of each: then every node holds the files of its own ranks
    and a marker, and a run resumes once the files of all nodes are copied into one folder.
    """

    folder: Path
    identity: RunIdentity
    keep_last: int
    model_only: bool
    first_of_node: bool
    """On the first rank of every node: it makes, marks and removes folders on the disk that it sees."""
    keep_best: bool = False
    """Keeps also the one whose ``state.best_step`` is its own step."""
    on_error: Literal["stop", "continue"] = "stop"
    in_background: bool = False
    current: Path | None = None
    """The checkpoint that holds what the engine holds, once one was written or the run resumed from it."""
    background: AsyncSaver = field(init=False)

    def __post_init__(self) -> None:
        if self.in_background:
            self.background = AsyncSaver()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for a save in flight, but not after a failure that peers may know nothing of."""
        if kind is None:
            self.wait()
        elif issubclass(kind, TrainingError):
            # The run has failed with something to say; what is being written may be its last good checkpoint.
            self._attend(self._finish, stop=False)

    def save(self, engine: Engine, state: State) -> None:
        """Writes what ``engine`` and ``state`` hold now, unless the checkpoint of this step is ``current``.

        With ``in_background`` it returns once a copy is made, after waiting for the save before.

        Raises:
            TrainingError: the disk of some rank refused; raised on every rank.
        """
        self.wait()
        target = step_folder(self.folder, state.step)
        if target == self.current:
            return
        meta = CheckpointMeta(vars(state).copy(), asdict(self.identity), self.model_only, {})
        tensors = engine.tensors(model_only=self.model_only)
        if self.in_background:
            write = partial(self._write, target, meta, self.background.group)
            self.background.start(write, tensors)
        else:
            self._attend(lambda: self._write(target, meta, None, tensors))

    def poll(self, engine: Engine) -> None:
        """Attends to a save in the background that has ended; raises as ``save`` does. Once a step."""
        if not (self.in_background and self.background.busy):
            return
        # Ranks see the end at different times, and must act on it at the same step.
        if engine.max_over_ranks(self.background.status) != RUNNING:
            self.wait()

    def wait(self) -> None:
        """Returns when no save is in flight; raises as ``save`` does."""
        self._attend(self._finish)

    def _finish(self) -> None:
        if self.in_background:
            self.background.finish()

    @property
    def last_write_s(self) -> float:
        """Seconds that a last save may take beside its copy: the one in flight before it, and itself."""
        return 2 * self.background.longest_s if self.in_background else 0.0

    def _attend(self, work: Callable[[], None], *, stop: bool | None = None) -> None:
        """Does ``work`` and says what its failure means, which is the same on every rank."""
        try:
            work()
        except OSError as error:
            free = shutil.disk_usage(nearest_existing(self.folder)).free
            message = (
                f"{self.folder}: the checkpoint could not be written: {error} ({free / 2**20:,.0f} MiB are "
                "free here); earlier checkpoints are untouched. Free some space, or lower "
                "checkpoint.keep_last, and resume; checkpoint.on_error=continue trains on without."
            )
            if self.on_error == "stop" if stop is None else stop:
                raise TrainingError(message) from error
            log.warning("%s", message)

    def _write(
        self,
        target: Path,
        meta: CheckpointMeta,
        group: dist.ProcessGroup | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Data, then meta.json, then the marker; OSError on every rank where the disk of one refused."""
        try:
            self._on_nodes(partial(create_dir, target), group)
            files = save_tensors(target, tensors, group)
            self._on_nodes(partial(commit, target, replace(meta, files=files)), group)
        except OSError:
            if self.first_of_node:
                discard(target)
            raise
        self.current = target
        log.info("step %d  saved %s", meta.state["step"], target)
        try:  # not before it is marked on every node
            self._on_nodes(partial(prune, self.folder, self.keep_last, keep_best=self.keep_best), group)
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed: %s", self.folder, error)

    def _on_nodes(self, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        """``work`` on the first rank of every node, and a barrier; an OSError of one is raised on all."""
        refusal: OSError | None = None
        if self.first_of_node:
            try:
                work()
            except OSError as error:
                refusal = error
        for refused in all_gather_objects(refusal, group):
            if refused is not None:
                raise refused


def nearest_existing(folder: Path) -> Path:
    """``folder``, or what is there of the way to it."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())
