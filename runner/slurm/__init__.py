"""SLURM: the place of a rank in its job, jobs that are queued again, and sweeps as arrays of jobs."""

from runner.slurm.environment import (
    MAX_REQUEUES,
    NOTICES,
    REASONS,
    job_facts,
    max_requeues,
    queue_again,
    ranks,
)

__all__ = ["MAX_REQUEUES", "NOTICES", "REASONS", "job_facts", "max_requeues", "queue_again", "ranks"]
