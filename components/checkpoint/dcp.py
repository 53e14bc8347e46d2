"""Tensors on disk: ``torch.distributed.checkpoint`` with keys that do not depend on engine or layout.

Keys are ``model/<name>``, ``<moment>/<name>`` (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``) with Hugging
Face parameter names, ``evaluated/<name>`` of an optimizer with other weights for evaluations,
``optimizer_step``, ``loss_scale`` of a run in fp16, and random states by rank: ``rng/<rank>``,
``rng_cuda/<rank>``, and Megatron's ``rng_<device>_<name>/<rank>``. Weights and moments are fp32.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from warnings import catch_warnings, filterwarnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from components.checkpoint.file_records import AliasPlanner, FileRecord, MeasuredWriter
from components.checkpoint.safe_reader import CheckpointReader, read_metadata
from components.contracts.errors import ConfigError, TrainingError
from components.json_text import one_line

EVALUATED = "evaluated"
"""Kind of the weights for evaluations, such as an average, if the optimizer trains other weights."""
T = TypeVar("T")


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, FileRecord]:
    """Write the shards of every rank (replicas once) into ``path``; collective if there is a process group.

    Returns:
        On every rank, the files that any rank has written. They are on disk.

    Raises:
        OSError: if writing fails on some rank; raised on every rank.
        TrainingError: if the tensors cannot be written for another reason.
    """
    writer = MeasuredWriter(path)
    try:
        no_dist = not dist.is_initialized()
        dcp.save(
            dict(tensors), storage_writer=writer, planner=AliasPlanner(), process_group=group, no_dist=no_dist
        )
    except dcp.CheckpointException as error:
        raise cause(error, f"{path}: the checkpoint could not be written: {error}") from error
    everywhere = all_gather_objects(writer.fs.records, group)
    return {name: record for records in everywhere for name, record in sorted(records.items())}


def load_tensors(path: Path, tensors: Mapping[str, Tensor], *, together: bool = True) -> None:
    """Read the stored values into ``tensors``, in place.

    Each rank reads its own slices, whatever layout wrote the checkpoint. The call is collective if there is a
    process group, except with ``together=False``: then ranks may read different tensors.

    Raises:
        TrainingError: if a tensor is missing, has another shape, or cannot be read.
    """
    try:
        no_dist = not (together and dist.is_initialized())
        with catch_warnings():
            # Torch warns that each process reads by itself, as it should here.
            filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=CheckpointReader(path), no_dist=no_dist)
    except (OSError, dcp.CheckpointException) as error:
        # The text of a CheckpointException is the tracebacks of all ranks.
        first = error if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
        reason = f"{type(first).__name__}: {one_line(first)}"
        remedy = "checkpoint.verify=true names a damaged file"
        missing = [] if isinstance(first, OSError) else sorted(tensors.keys() - saved_keys(path))
        if missing:
            reason = f"it has no {missing[0]}"
            remedy = "resume with the options of optimizer, model, adapter and hook of its run"
        raise TrainingError(f"{path}: could not be read ({reason}); {remedy}.") from error


def saved_keys(path: Path) -> set[str]:
    return set(saved_sizes(path))


def saved_sizes(path: Path) -> dict[str, Size]:
    """Return the size of each (unsharded) tensor of the checkpoint ``path``, by key."""
    entries = read_metadata(path).state_dict_metadata.items()
    return {key: entry.size for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def all_gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """All-gather a picklable value, ordered by rank; collective if there is a process group."""
    if not dist.is_initialized():
        return [value]
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class InCollectiveError(Exception):
    """An error after which this rank joins no more collectives of the current task.

    The other ranks must not wait for it. The only argument is the error itself.
    """


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``work`` and all-gather the results, ordered by rank; an error on one rank is raised on all ranks.

    Collective if there is a process group, unless ``work`` raises InCollectiveError: the error that this
    holds is raised at once, only on this rank, because the others wait in another collective. On the other
    ranks, an error that is not an OSError, a ConfigError or a TrainingError is a RuntimeError, because pickle
    may not be able to copy it.
    """
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except InCollectiveError as error:
        raise error.args[0] from None
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait
        failure = error
    is_ours = isinstance(failure, OSError | ConfigError | TrainingError | None)
    shared = failure if is_ours else RuntimeError(f"{type(failure).__name__}: {failure}")
    everywhere = all_gather_objects((results, shared), group)
    for raised in (failure, *(of_rank for _, of_rank in everywhere)):
        if raised is not None:
            raise raised
    return [result for own, _ in everywhere for result in own]


def cause(error: dcp.CheckpointException, message: str) -> BaseException:
    """Return the OSError or interrupt that torch caught on a rank, or else TrainingError(message)."""
    caught = [failure for failure, _ in error.failures.values()]
    for kind in (OSError, KeyboardInterrupt, SystemExit):
        if found := [failure for failure in caught if isinstance(failure, kind)]:
            return found[0]
    return TrainingError(message)
