"""Sweeps as arrays of SLURM jobs."""
