"""Management of checkpoints: when one is complete, how many are kept, and what follows a failed save."""

import contextlib
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
from components.checkpoint.dcp import gather_results, save_tensors
from components.checkpoint.folder import (
    CheckpointMeta,
    commit,
    create_dir,
    prune,
    read_meta,
    remove,
    replace_meta,
    step_folder,
)
from components.checkpoint.resume import RunIdentity
from components.contracts.engine import Engine
from components.contracts.errors import ConfigError, TrainingError

log = logging.getLogger(__name__)


class State(Protocol):
    """A dataclass of counters that a checkpoint contains. The checkpoint's folder is named after ``step``."""

    step: int


@dataclass
class CheckpointManager:
    """Writer of the checkpoints ``folder/step_XXXXXXXX``, each of them atomic.

    The newest ``keep_last`` checkpoints are kept (0: all). All ranks must create the manager and call every
    method together. ``folder`` may be on a filesystem that all nodes share, or have the same path on a local
    disk of each node. With local disks, every node holds the files of its own ranks and a marker, and a run
    can resume after the files of all nodes have been copied into one folder.
    """

    folder: Path
    identity: RunIdentity
    keep_last: int
    model_only: bool
    first_of_node: bool
    """Whether this is the first rank of its node, which creates, marks and removes folders on its disk."""
    keep_best: bool = False
    """Whether the checkpoint of ``state.best_step`` is kept, too."""
    on_error: Literal["stop", "continue"] = "stop"
    in_background: bool = False
    current: Path | None = None
    """The checkpoint that was written last or resumed from. None means that there is none yet."""
    on_saved: Callable[[Path], object] | None = None
    """Function that is called on every rank with each new checkpoint, after it is complete on all ranks."""
    background: AsyncSaver = field(init=False)

    def __post_init__(self) -> None:
        self._announced = self.current
        if self.in_background:
            self.background = AsyncSaver()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save in flight, except after a failure that other ranks may not have noticed."""
        if kind is None:
            self.wait()
        elif issubclass(kind, TrainingError):
            # An error that the run reports itself; the save in flight may be its last good checkpoint.
            self.on_saved = None  # hooks exchange data, and other ranks may still be in the step that failed
            self._attend(self._finish, stop=False)

    def save(self, engine: Engine, state: State, others: Mapping[str, Tensor] = {}) -> bool:
        """Save ``engine``, ``state`` and ``others``, unless ``current`` is the checkpoint of this step.

        Return whether the call has written the whole checkpoint. With ``in_background``, it waits for the
        previous save and returns after copying the tensors. A failure of the new save is then raised by a
        later call.

        Raises:
            TrainingError: on every rank, if the disk of some rank failed and ``on_error`` is ``stop``, or if
                torch could not write the tensors for another reason.
        """
        self.wait()
        if self.has_saved(state.step):
            return False
        target = step_folder(self.folder, state.step)
        meta = CheckpointMeta(vars(state).copy(), asdict(self.identity), self.model_only, {})
        tensors = {**engine.tensors(model_only=self.model_only), **others}
        if self.in_background:
            write = partial(self._write, target, meta, self.background.group)
            self.background.start(write, tensors)
            return False
        self._attend(lambda: self._write(target, meta, None, tensors))
        return self.has_saved(state.step)

    def update_state(self, state: State) -> None:
        """Write ``state`` into ``current`` if that is the checkpoint of its step; raises as ``save`` does."""
        if self.current is not None and self.has_saved(state.step):
            self._attend(partial(self._replace_state, self.current, state))

    def has_saved(self, step: int) -> bool:
        """Return whether ``current`` is the checkpoint of ``step``."""
        return self.current == step_folder(self.folder, step)

    def _replace_state(self, checkpoint: Path, state: State) -> None:
        found: list[CheckpointMeta] = []

        def read() -> None:
            try:
                found.append(read_meta(checkpoint))
            except ConfigError as error:
                raise OSError(str(error)) from error

        self._on_nodes(read, None)  # on a shared disk, no node may read while another one writes
        self._on_nodes(lambda: replace_meta(checkpoint, replace(found[0], state=vars(state).copy())), None)

    def poll(self, engine: Engine) -> None:
        """Finish a background save that has ended on all ranks or failed on one; raises as ``save`` does.

        Every rank calls this method once per step: it is collective while a save is in flight.
        """
        if not (self.in_background and self.background.busy):
            return
        # Saves end at different times on different ranks, but ranks must handle the end at the same step.
        if engine.max_over_ranks(self.background.status) != RUNNING:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight; raises as ``save`` does."""
        self._attend(self._finish)

    def _finish(self) -> None:
        if self.in_background:
            self.background.finish()

    @property
    def last_write_s(self) -> float:
        """Time to allow for the writes of a final save and of the save before it, in seconds."""
        return 2 * self.background.longest_s if self.in_background else 0.0

    def _attend(self, work: Callable[[], None], *, stop: bool | None = None) -> None:
        """Run ``work``, which raises an OSError on every rank or on none, then announce a new checkpoint.

        With ``stop`` the error becomes a TrainingError, else it is logged. None means ``on_error``.
        """
        try:
            work()
        except OSError as error:
            # The nearest folder that exists.
            there = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
            free = shutil.disk_usage(there).free
            message = (
                f"{self.folder}: the checkpoint could not be written: {error} ({free / 2**20:,.0f} MiB are "
                "free here); earlier checkpoints are untouched. Free some space, or lower "
                "checkpoint.keep_last, and resume; checkpoint.on_error=continue trains on without."
            )
            if self.on_error == "stop" if stop is None else stop:
                raise TrainingError(message) from error
            log.warning("%s", message)
        # No save is in flight here, so ``current`` is the same on all ranks.
        if self.current is not None and self.current != self._announced:
            self._announced = self.current
            if self.on_saved is not None:
                self.on_saved(self.current)

    def _write(
        self,
        target: Path,
        meta: CheckpointMeta,
        group: dist.ProcessGroup | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Write data, meta.json and the marker, in this order; an OSError of one rank is raised on all."""
        try:
            # An earlier checkpoint of this step goes first, on all nodes: they may share the filesystem.
            self._on_nodes(partial(remove, target), group)
            self._on_nodes(partial(create_dir, target), group)
            files = save_tensors(target, tensors, group)
            self._on_nodes(partial(commit, target, replace(meta, files=files)), group)
        except OSError:
            if self.first_of_node:
                with contextlib.suppress(OSError):
                    remove(target)
            raise
        self.current = target
        log.info("step %d  saved %s", meta.state["step"], target)
        try:  # only after it is marked on every node
            self._on_nodes(partial(prune, self.folder, self.keep_last, keep_best=self.keep_best), group)
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed: %s", self.folder, error)

    def _on_nodes(self, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        """Run ``work`` on the first rank of every node; an error of one is raised on all ranks.

        Collective over ``group``. None means the default group.
        """
        gather_results(lambda: work() if self.first_of_node else None, group)
