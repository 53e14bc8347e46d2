"""Rehearsal of one rank on fake CUDA tensors, in the process of ``runner.launch.rehearsal_main``."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from components.contracts.json_types import Json
from components.rehearsal.fake_cuda import Gpu
from components.rehearsal.outcome import describe
from components.rehearsal.rehearsed_run import RehearsedRun, install, rehearse
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from runner.records.run_dir import read_run_config
from runner.training.assembly import training_options, unlogged_run
from runner.training.determinism import deterministic


def rehearse_rank(folder: Path, request: Json) -> Json:
    """Rehearse one rank of the run in ``folder``, as ``request``, the content of request.json, describes.

    The result has the number of the rank, the duration of the rehearsal in seconds, and the entries of
    ``describe``.
    """
    experiment = build_experiment(read_run_config(folder), ConfigSources())
    rank, world_size = request["rank"], request["world_size"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    run = RehearsedRun(
        parallelism=experiment.parallelism,
        model=experiment.model,
        optimizer=experiment.optimizer,
        # Triton kernels need real tensors. Those of torch compute the same and save more for backward.
        options=replace(training_options(experiment, "cuda"), kernels="torch"),
        loss=experiment.stage,
        data=experiment.data.restore(request["data"]),
        global_batch_size=experiment.run.global_batch_size,
        micro_batch_size=experiment.run.rows_per_microbatch,
        hooks=[hook for hook in experiment.hook.values() if hook.weight_copies],
        has_ref_logps=experiment.reference.choice == "precomputed",
        observed=partial(unlogged_run, experiment, folder),
    )
    mode = install(Gpu(**request["gpu"]), rank, world_size)
    with deterministic(experiment.run.deterministic):
        seconds = rehearse(run, mode, request["steps"])
    return {"rank": rank, "seconds": seconds} | describe(mode)
