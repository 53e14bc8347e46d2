"""The parity tables with fewer steps and rows than the benchmark's, which still show a broken layout."""

from dataclasses import replace

from benchmarks.parity.parity_rows import Table


def shortened(table: Table, *, batch: int = 8) -> Table:
    """Return a table of three steps; 8 rows are four micro-batches of two, enough for a pipeline."""
    return replace(table, experiment=(*table.experiment, "run.max_steps=3", f"run.global_batch_size={batch}"))
