"""Filling the cache of reference log-probabilities for ``stage.reference=precomputed``."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from components.contracts.configs import Prepared
from components.contracts.data import BatchShard
from components.contracts.engine import Engine
from components.data.loader import PreparedData, TokenDataLoader
from components.data.progress import show_progress
from components.data.store.reference_logps import ReferenceLogps, part_file


def precompute(
    engine: Engine,
    data: Prepared,
    folder: Path,
    *,
    scratch: Path,
    micro_batch_size: int,
    writes: bool,
    merges: bool,
    beat: Callable[[], object],
) -> None:
    """Compute the reference log-probabilities of every sample once and store them in the cache.

    ``engine`` has the reference ``adapter_off``: its own model. Each sample is in the same micro-batch as in
    its first training step, so in the same layout the values are bitwise those of a frozen reference. All
    ranks must call this function together.

    Args:
        folder: cache of the reference model (``ReferenceSource.folder``).
        scratch: a folder on a filesystem that all ranks share; removed at the end.
        writes: True on one rank, which removes ``scratch`` and shows the progress.
        beat: called before the micro-batches of each step.
        merges: True on one rank per filesystem of ``folder``, which merges the parts into the cache.
    """
    assert isinstance(data, PreparedData)
    if writes:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed here
    engine.barrier()
    shard = BatchShard(data.global_batch_size, micro_batch_size, engine.dp_rank, engine.dp_size)
    for number, split in enumerate(data.splits):
        target, parts = split.reference(folder), scratch / str(number)
        score(engine, data.loader(split, shard), target, parts, visible=writes, beat=beat)
        engine.barrier()  # all ranks have written their parts
        if merges:
            target.merge(sorted(parts.glob("part_*")))
        engine.barrier()
    if writes:
        shutil.rmtree(scratch)


def score(
    engine: Engine,
    loader: TokenDataLoader,
    target: ReferenceLogps,
    parts: Path,
    *,
    visible: bool,
    beat: Callable[[], object],
) -> None:
    """Write this rank's log-probabilities to ``parts``, skipping samples that earlier steps have."""
    file = None
    with ExitStack() as stack:
        advance = stack.enter_context(show_progress("reference", "samples")) if visible else lambda _: None
        for step, seen in loader.steps_with_new_samples():
            beat()
            batches = loader.microbatches(step)
            logps = engine.logps(batches, reference=True)
            if logps is not None:
                # Opened only here: other pipeline stages with this data rank get no log-probabilities.
                file = file or stack.enter_context(part_file(parts, engine.dp_rank))
                for rows, batch, found in zip(loader.shares(step), batches, logps, strict=True):
                    file.write(target.records(batch, np.concatenate(rows), found, seen).tobytes())
            advance(len(loader.segments(step)) // loader.sequences_per_sample)
