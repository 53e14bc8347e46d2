"""Tensors on disk: ``torch.distributed.checkpoint`` under names that no engine and no layout changes.

Keys are ``model/<name>``, ``<moment>/<name>`` (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``) with Hugging
Face parameter names, ``optimizer_step``, and random streams by rank: ``rng/<rank>``, ``rng_cuda/<rank>``, and
Megatron's ``rng_<device>_<name>/<rank>``. Weights and moments are fp32.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from runner.errors import TrainingError


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank writes its shards (replicas once) into ``path``; collective where there is a group.

    Raises:
        TrainingError: the disk refused.
    """
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path), no_dist=not dist.is_initialized())
    except (OSError, dcp.CheckpointException) as error:
        raise TrainingError(f"{path}: the checkpoint could not be written: {error}") from error


def load_tensors(path: Path, tensors: Mapping[str, Tensor], *, together: bool = True) -> None:
    """Reads into ``tensors`` in place, each rank its own slices, whatever layout wrote them.

    Collective where there is a group; not with ``together=False``, where every rank reads what it likes.

    Raises:
        TrainingError: a tensor is missing, has another shape, or cannot be read.
    """
    try:
        no_dist = not (together and dist.is_initialized())
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path), no_dist=no_dist)
    except (OSError, dcp.CheckpointException) as error:
        raise TrainingError(f"{path}: the checkpoint could not be read: {error}") from error


def saved_keys(path: Path) -> set[str]:
    return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
