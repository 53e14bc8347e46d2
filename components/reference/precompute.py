"""Fills the cache that ``stage.reference=precomputed`` trains with."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from components.contracts.configs import Prepared
from components.contracts.engine import Engine
from components.data.audit import show_progress
from components.data.loader import PreparedData, TokenDataLoader
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
    """Asks ``engine``, whose reference (``adapter_off``) is its own model, about every sample once.

    In the micro-batches in which it is first trained on, so that one layout finds to the bit what a frozen
    reference would say there. Every rank calls it together.

    Args:
        folder: of the reference model (``ReferenceSource.folder``).
        scratch: a folder that all ranks see; it is gone afterwards.
        writes: on one rank, which makes and removes ``scratch``.
        beat: is called before every batch.
        merges: on one rank of every filesystem that ``folder`` may be on.
    """
    assert isinstance(data, PreparedData)
    if writes:
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed here
    engine.barrier()
    for number, split in enumerate(data.splits):
        sizes = data.global_batch_size, micro_batch_size, engine.dp_rank, engine.dp_size
        target, parts = split.reference(folder), scratch / str(number)
        score(engine, data.loader(split, *sizes), target, parts, visible=writes, beat=beat)
        engine.barrier()  # everybody has written
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
    """Writes what this rank finds to ``parts``; what comes again in a later step is known by then."""
    seen, file = np.zeros(len(target.lengths), np.bool_), None
    with ExitStack() as stack:
        advance = stack.enter_context(show_progress("reference samples")) if visible else lambda _: None
        for step in range(loader.num_steps):
            sequences = loader.segments(step)[:, 0]
            if seen[sequences].all():
                continue
            beat()
            batches = loader.microbatches(step)
            logps = engine.logps(batches, reference=True)
            if logps is not None:
                # Not before: other pipeline stages have this data rank too, and nothing to write.
                file = file or stack.enter_context(part_file(parts, engine.dp_rank))
                for rows, batch, found in zip(loader.shares(step), batches, logps, strict=True):
                    file.write(target.records(batch, np.concatenate(rows), found, seen).tobytes())
            seen[sequences] = True
            advance(len(sequences) // loader.sequences_per_sample)
