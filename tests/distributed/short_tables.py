"""The parity tables with fewer steps and rows than the benchmark's, which still show a broken layout."""

from dataclasses import replace

from benchmarks.parity.parity_rows import Table


def shortened(table: Table, *, batch: int = 8) -> Table:
    """Return a table of three steps of ``batch`` rows; 8 are four micro-batches for a pipeline of two rows each."""
    return replace(table, experiment=(*table.experiment, "run.max_steps=3", f"run.global_batch_size={batch}"))
