"""Output of ``hydra.launcher.dry_run=true``: script, environment and jobs of a submission."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweeps.slurm.sbatch import SbatchOptions

if TYPE_CHECKING:
    from runner.sweeps.slurm.job import SlurmJob

CONCERNS = re.compile(r"(CUDA|GLOO|HF|MASTER|NCCL|OMP|PYTHON|RUNNER|SBATCH|SLURM|SRUN|TORCH|VIRTUAL|WANDB)_?")
SECRET = re.compile("KEY|PASSWORD|SECRET|TOKEN")


def print_dry_run(allocation: SbatchOptions, folder: Path, jobs: Sequence["SlurmJob"]) -> None:
    """Print the script, environment and jobs of the submission on stdout."""
    print(allocation.script(folder, len(jobs)))
    print("# environment: that of this shell, which sbatch passes on. Variables that may affect a run:")
    for line in slurm_variables(os.environ):
        print(line)
    if allocation.ranks is None:
        print("# the job's one task starts its ranks itself")
    else:
        print(
            f"# each task is one of {allocation.ranks} ranks, with RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, "
            "MASTER_ADDR (the first node) and MASTER_PORT from its variables of SLURM"
        )
    print("# jobs")
    for job in jobs:
        print(f"# {job.sweep_job.number}: {shlex.join(job.sweep_job.overrides)}")
    print(f"nothing was submitted (hydra.launcher.dry_run=true); jobs: {len(jobs)}")


def slurm_variables(environ: Mapping[str, str]) -> list[str]:
    """Return bash lines that export the variables that may affect a run, with likely secrets masked."""
    found = sorted((name, value) for name, value in environ.items() if CONCERNS.match(name))
    return [f"export {name}={'***' if SECRET.search(name) else shlex.quote(value)}" for name, value in found]
