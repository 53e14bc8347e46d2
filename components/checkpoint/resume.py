"""The checkpoint that ``checkpoint.resume`` means, and which run may continue from it."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from components.checkpoint.files import damage
from components.checkpoint.folder import (
    CheckpointMeta,
    complete_checkpoints,
    is_complete,
    read_meta,
    step_of,
    unmark,
)
from components.contracts.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunIdentity:
    """What a run and its continuation have in common."""

    model: str
    """Hash of parameter names and shapes."""
    data: str
    """Hash of the data and of everything that shapes its plan, but for the batch size."""
    optimizer: str
    """Its kind: another one has other moments."""
    reference: str | None
    """Where the weights of a reference model come from; None: there is none."""
    seed: int
    global_batch_size: int
    trained: str | None = None
    """Where a part of the model is trained, or an adapter: hash of its parameters' names and shapes."""
    base: str | None = None
    """Then, hash of what the rest is made of, which is in no checkpoint."""


REMEDIES = {
    "model": "model: the checkpoint is of another model; use the one it was written with",
    "optimizer": "set optimizer={theirs}",
    "reference": "the reference model was {theirs}; set checkpoint.init_from, model.init, model.path, "
    "model.revision and stage.reference_path to it",
    "trained": "adapter, model.freeze: other parameters were trained; use those of its run",
    "base": "model: the frozen weights are not those of its run (model.path has changed); use the same",
    "seed": "set run.seed={theirs}",
    "global_batch_size": "set run.global_batch_size={theirs}",
    "data": "data: the samples, the tokenizer or an option that shapes batches differ; use those of its run",
}
"""In the order of asking: a seed changes the plan of the data too."""

FORCED = ("seed", "global_batch_size", "data")
"""What ``checkpoint.allow_mismatch`` lets change: the step stays, and later global batches differ."""


@dataclass(frozen=True)
class Resume:
    """``checkpoint.resume`` and the keys beside it."""

    mode: str
    """``never``, ``auto``, a run folder or a checkpoint folder."""
    verify: bool = False
    """Read every byte of the checkpoint and compare checksums; sizes are always compared."""
    force: bool = False

    def resolve(self, output_dir: Path, name: str, identity: RunIdentity) -> Path | None:
        """The checkpoint to continue from; None: start afresh.

        Raises:
            ConfigError: there is none where one was named, it is damaged, or it belongs to another run.
        """
        if self.mode == "never":
            return None
        point = (
            newest(output_dir / name)
            if self.mode == "auto"
            else find_checkpoint("checkpoint.resume", self.mode)
        )
        if point is not None:
            meta = verify_checkpoint(point, checksums=self.verify)
            check_same_run(point, meta, identity, force=self.force)
        return point


def newest(runs: Path) -> Path | None:
    """Of the newest run folder that holds a complete checkpoint."""
    for run in sorted((path for path in runs.glob("*") if path.is_dir()), key=run_order, reverse=True):
        if found := complete_checkpoints(run / "checkpoints"):
            return found[-1]
    return None


def run_order(run: Path) -> tuple[str, int]:
    """By stamp, then by the number that tells apart runs of one second."""
    stamp, _, number = run.name.partition("__")
    return stamp, int(number) if number.isdigit() else 0


def resolve_checkpoint(option: str, path: str) -> Path:
    """The checkpoint folder ``path``; of a run folder, or a folder of runs, its newest one; absolute.

    Raises:
        ConfigError: (naming ``option``) there is none, or a file of it is not as long as it was written.
    """
    point = find_checkpoint(option, path)
    verify_checkpoint(point, checksums=False, option=option)
    return point


def find_checkpoint(option: str, path: str) -> Path:
    given = Path(path).expanduser().absolute()
    if is_complete(given):
        return given
    if given.name.startswith("step_") and given.is_dir():
        raise ConfigError(f"{option}: {path} was never completed; take another checkpoint of its run.")
    found = complete_checkpoints(given / "checkpoints")
    newest_one = found[-1] if found else newest(given)
    if newest_one is None:
        reason = "holds no complete checkpoint" if given.is_dir() else "is not a folder"
        raise ConfigError(f"{option}: {path} {reason}; give a run folder or a checkpoint folder.")
    return newest_one


def verify_checkpoint(point: Path, *, checksums: bool, option: str = "checkpoint.resume") -> CheckpointMeta:
    """
    Raises:
        ConfigError: (naming ``option``) a file is not as it was written; offers the newest whole checkpoint
            before it.
    """
    meta, wrong = inspect_checkpoint(point, checksums=checksums)
    if meta is not None and wrong is None:
        return meta
    earlier = [folder for folder in complete_checkpoints(point.parent) if step_of(folder) < step_of(point)]
    offers = (
        folder for folder in reversed(earlier) if inspect_checkpoint(folder, checksums=checksums)[1] is None
    )
    offer = next(offers, None)
    remedy = "no earlier one of its run is whole" if offer is None else f"take {option}={offer}"
    raise ConfigError(f"{option}: {point}: {wrong}; {remedy}.")


def newest_valid(checkpoints: Path) -> Path | None:
    """Of those that count, the newest whose files are all there and as long as they were.

    Newer ones do not count any more, so that pruning takes none of them for the newest.
    """
    for folder in reversed(complete_checkpoints(checkpoints)):
        if inspect_checkpoint(folder, checksums=False)[1] is None:
            return folder
        unmark(folder)
    return None


def inspect_checkpoint(point: Path, *, checksums: bool) -> tuple[CheckpointMeta | None, str | None]:
    """What the checkpoint says of itself, and what is wrong with it."""
    try:
        meta = read_meta(point)
    except ConfigError:
        return None, "meta.json is damaged"
    return meta, damage(point, meta.files, checksums=checksums)


def check_same_run(point: Path, meta: CheckpointMeta, identity: RunIdentity, *, force: bool) -> None:
    if meta.model_only:
        raise ConfigError(
            f"checkpoint.resume: {point} holds weights alone (checkpoint.model_only=true); nothing can "
            "resume from it."
        )
    ours = asdict(identity)
    for key, remedy in REMEDIES.items():
        theirs = meta.identity.get(key)
        if ours[key] == theirs:
            continue
        if key == "reference" and theirs is None:
            remedy = "its run had no reference; set stage.reference=none"
        remedy = remedy.format(theirs=theirs)
        if key not in FORCED:
            raise ConfigError(f"checkpoint.resume: {point}: {remedy}.")
        if not force:
            raise ConfigError(
                f"checkpoint.resume: {point}: {remedy}, or checkpoint.allow_mismatch=true to go on all the "
                "same."
            )
        log.warning(
            "checkpoint.allow_mismatch: %s of %s differs and is let pass: %s",
            key,
            point,
            changed(key, theirs, ours),
        )


def changed(key: str, theirs: object, ours: dict[str, object]) -> str:
    return "other batches follow" if key == "data" else f"it was {theirs}, and is {ours[key]}"
