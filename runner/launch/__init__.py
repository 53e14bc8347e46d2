"""The launch of a run: checks, run folder, ranks and final report."""
