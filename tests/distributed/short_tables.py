"""The parity tables with fewer steps and rows than the benchmark's, which still show a broken layout."""

from dataclasses import replace

from benchmarks.parity.parity_rows import Table


def shortened(table: Table, *, batch: int = 8) -> Table:
    """Return a table of fewer steps; 8 rows are at least four micro-batches, enough for a pipeline."""
    less = ("run.max_steps=3", f"run.global_batch_size={batch}")
    return replace(table, experiment=(*table.experiment, *less))
