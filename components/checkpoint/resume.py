"""Finding the checkpoint for ``checkpoint.resume``, and checking that the run may continue from it."""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

from components.checkpoint.file_records import damage
from components.checkpoint.folder import (
    CheckpointMeta,
    complete_checkpoints,
    is_complete,
    read_meta,
    step_of,
    unmark,
)
from components.checkpoint.safe_reader import read_metadata
from components.contracts.errors import ConfigError
from components.run_exports import hint_for_run

log = logging.getLogger(__name__)

STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(__\d+)?")
"""The name of a run folder: the time of its start, and a number if another run started in that second."""


@dataclass(frozen=True)
class RunIdentity:
    """Properties that a run and its continuation must share."""

    model: str
    """Hash of parameter names and shapes."""
    data: str
    """Hash of the data and of everything that determines global batches, except their size."""
    optimizer: str
    """Kind of optimizer. Different kinds have different moments."""
    reference: str | None
    """Source of the reference model's weights, for messages. None means that there is no reference model."""
    seed: int
    global_batch_size: int
    trained: str | None = None
    """Hash of the trained parameters' names and shapes. None means that the whole model is trained."""
    base: str | None = None
    """Hash of the source of the frozen weights, which checkpoints do not contain. None means that all weights
    are trained."""
    reference_content: str | None = None
    """Hash of everything that determines the reference model's weights. None means that there is no reference
    model, or that an earlier version wrote the checkpoint without a hash; then ``reference`` is compared."""


REMEDIES = {
    "model": "model: the checkpoint is of another model; use the one it was written with",
    "optimizer": "its optimizer was {theirs}; use the optimizer options of its run (in its config.yaml)",
    "seed": "set run.seed={theirs}",
    "trained": "adapter, model.freeze, model.train_only: other parameters were trained; use those of its run",
    "base": "model: the frozen weights are not those of its run (checkpoint.init_from, model.path or "
    "run.seed has changed); use the same",
    "reference": "the reference model was {theirs}; set checkpoint.init_from, model.init, model.path, "
    "model.revision, stage.reference_path, stage.sync_reference_* and run.seed to it, with the same files",
    "global_batch_size": "set run.global_batch_size={theirs}",
    "data": "data: the samples, the tokenizer or an option that shapes batches differ; use those of its run",
}
"""Property -> remedy, in the order of the checks. The seed is checked before properties that depend on it."""

FORCED = ("seed", "global_batch_size", "data")
"""Properties that ``checkpoint.allow_mismatch`` allows to differ: the step is kept, later batches differ."""


@dataclass(frozen=True)
class Resume:
    """``checkpoint.resume`` and its related keys."""

    mode: str
    """``never``, ``auto``, or the path of a checkpoint, a run folder or a folder of runs."""
    verify: bool = False
    """Whether to read every byte of the checkpoint and compare checksums. Sizes are always compared."""
    force: bool = False
    evaluates: bool = False
    """Whether the run only evaluates. Its stage may then be another one, without a reference model, and the
    checkpoint may hold only weights."""

    def resolve(
        self,
        output_dir: Path,
        name: str,
        identity: RunIdentity,
        accepts: Callable[[Path], bool] = bool,
    ) -> Path | None:
        """Return the checkpoint to resume from. None means that the run starts from step 0.

        ``auto`` considers only the run folders for which ``accepts`` returns True.

        Raises:
            ConfigError: if the named checkpoint does not exist, or if the checkpoint is damaged, holds only
                weights, or belongs to another run.
        """
        if self.mode == "never":
            return None
        named = self.mode != "auto"
        runs = output_dir / name
        point = find_checkpoint("checkpoint.resume", self.mode) if named else newest_of_runs(runs, accepts)
        if point is not None:
            meta = verify_checkpoint(point, checksums=self.verify)
            if self.evaluates:
                identity = for_evaluation(identity, meta)
            elif meta.model_only:
                raise ConfigError(
                    f"checkpoint.resume: {point} holds only weights (checkpoint.model_only=true); nothing "
                    "can resume from it, and checkpoint.init_from starts a new run with them."
                )
            check_same_run(point, meta, identity, force=self.force)
        return point


def newest_of_runs(runs: Path, accepts: Callable[[Path], bool] = bool) -> Path | None:
    """Return the newest complete checkpoint of the newest folder of ``runs`` that has one and is accepted.

    None means that there is none. Folders with names of a user's own, such as copies, come last.
    """
    folders = (path for path in runs.glob("*") if path.is_dir())
    for run in sorted(folders, key=lambda run: (is_run_folder(run), run_order(run)), reverse=True):
        if (found := complete_checkpoints(run / "checkpoints")) and accepts(run):
            return found[-1]
    return None


def is_run_folder(path: Path) -> bool:
    """Return whether ``path`` has the name of a run folder, which copies made by a user do not have."""
    return STAMP.fullmatch(path.name) is not None


def run_order(run: Path) -> tuple[str, int]:
    """Return the sort key of a run folder: its stamp, then its number among runs of one second."""
    stamp, _, number = run.name.partition("__")
    return stamp, int(number) if number.isdigit() else 0


def resolve_checkpoint(option: str, path: str) -> Path:
    """Return the absolute path of a checkpoint: ``path`` or, in a run folder or folder of runs, the newest.

    Raises:
        ConfigError: (naming ``option``) if there is none, or if it is damaged. Checksums are not compared.
    """
    point = find_checkpoint(option, path)
    verify_checkpoint(point, checksums=False, option=option)
    return point


def find_checkpoint(option: str, path: str) -> Path:
    given = Path(path).expanduser().absolute()
    if is_complete(given):
        return given
    found = complete_checkpoints(given / "checkpoints")
    newest_one = found[-1] if found else newest_of_runs(given)
    if newest_one is None and given.name.startswith("step_") and given.is_dir():
        raise ConfigError(f"{option}: {path} was never completed; take another checkpoint of its run.")
    if newest_one is None:
        reason = "holds no complete checkpoint" if given.is_dir() else "is not a folder"
        raise ConfigError(
            f"{option}: {path} {reason}; give a run folder or a checkpoint folder.{hint_for_run(given)}"
        )
    return newest_one


def verify_checkpoint(point: Path, *, checksums: bool, option: str = "checkpoint.resume") -> CheckpointMeta:
    """Return the metadata of the checkpoint ``point`` after checking its files.

    Raises:
        ConfigError: (naming ``option``) if a file differs from what was written. The message suggests the
            newest earlier checkpoint that is intact.
    """
    meta, wrong = inspect_checkpoint(point, checksums=checksums)
    if meta is not None and wrong is None:
        return meta
    number = re.match(r"step_(\d+)", point.name)  # a user may have renamed the folder
    last = math.inf if number is None else int(number[1])
    earlier = [folder for folder in complete_checkpoints(point.parent) if step_of(folder) < last]
    offers = (
        folder for folder in reversed(earlier) if inspect_checkpoint(folder, checksums=checksums)[1] is None
    )
    offer = next(offers, None)
    remedy = "no earlier checkpoint of its run is intact" if offer is None else f"take {option}={offer}"
    raise ConfigError(f"{option}: {point}: {wrong}; {remedy}.")


def newest_valid(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint whose files all have the written size. None means there is none.

    The markers of newer, damaged checkpoints are removed, so that pruning does not count them as the newest.
    """
    for folder in reversed(complete_checkpoints(checkpoints)):
        if inspect_checkpoint(folder, checksums=False)[1] is None:
            return folder
        unmark(folder)
    return None


def inspect_checkpoint(point: Path, *, checksums: bool) -> tuple[CheckpointMeta | None, str | None]:
    """Return the content of meta.json, and a description of the damage to the checkpoint.

    The content is None if meta.json is damaged; the description is None if nothing is damaged.
    """
    try:
        meta = read_meta(point)
    except ConfigError:
        return None, "meta.json is damaged, or of a later version"
    return meta, damage(point, meta.files, checksums=checksums) or metadata_damage(point)


def metadata_damage(point: Path) -> str | None:
    """Describe why ``.metadata`` cannot be read. None means that it can be read or does not exist."""
    try:
        read_metadata(point)
    except FileNotFoundError:
        return None
    except (OSError, UnpicklingError) as error:
        return f".metadata cannot be read: {error}"
    return None


def for_evaluation(identity: RunIdentity, meta: CheckpointMeta) -> RunIdentity:
    """Return ``identity`` with what an evaluation does not need taken from the checkpoint."""
    theirs = meta.identity
    if identity.reference is None:
        reference, content = theirs.get("reference"), theirs.get("reference_content")
        identity = replace(identity, reference=reference, reference_content=content)
    return replace(identity, optimizer=theirs.get("optimizer", identity.optimizer))


def check_same_run(point: Path, meta: CheckpointMeta, identity: RunIdentity, *, force: bool) -> None:
    ours = asdict(identity)
    for key, remedy in REMEDIES.items():
        theirs = meta.identity.get(key)
        compared = (
            "reference_content" if key == "reference" and meta.identity.get("reference_content") else key
        )
        if ours[compared] == meta.identity.get(compared):
            continue
        if key == "reference" and theirs is None:
            remedy = "its run had no reference; set stage.reference=none"
        remedy = remedy.format(theirs=theirs)
        if key not in FORCED:
            raise ConfigError(f"checkpoint.resume: {point}: {remedy}.")
        if not force:
            raise ConfigError(
                f"checkpoint.resume: {point}: {remedy}, or checkpoint.allow_mismatch=true to resume anyway."
            )
        effect = "other batches follow" if key == "data" else f"it was {theirs}, and is {ours[key]}"
        log.warning("checkpoint.allow_mismatch: %s of %s differs and is ignored: %s", key, point, effect)
