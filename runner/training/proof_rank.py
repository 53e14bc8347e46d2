"""One rank of a proof, ``preflight.mode=prove``, which compares a layout with one process."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from components.contracts.errors import TrainingError
from components.contracts.json_types import Json
from components.proof.steps import ProofRun
from components.rank_info import RankInfo
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from runner.records.run_dir import read_run_config
from runner.training.assembly import build_engine, reference_hook, unlogged_run
from runner.training.watchdog import Watchdog, end_process


def prove_rank(folder: Path, give_up: Callable[[TrainingError], object] = end_process) -> None:
    """Run the steps of a proof and write their results to ``folder/layout``; every rank calls this function.

    ``give_up`` ends the process if there is no progress for ``run.hang_timeout_s`` seconds.
    """
    experiment = build_experiment(read_run_config(folder), ConfigSources())
    rank, timeout = RankInfo.read().rank, experiment.run.hang_timeout_s
    with Watchdog(folder / "logs", rank, timeout, give_up, on_request=True):
        request = json.loads((folder / "proof.json").read_text())
        proof_run(experiment, folder, request["data"]).take(folder / "layout", request["lr"])


def proof_run(experiment: Experiment, folder: Path, data: Json) -> ProofRun:
    """Build the ``ProofRun`` of ``experiment`` with prepared ``data``; hooks write to ``folder``."""
    return ProofRun(
        build=lambda optimizer: build_engine(replace(experiment, optimizer=optimizer), "cpu"),
        optimizer=experiment.optimizer,
        scheduler=experiment.scheduler,
        loss=experiment.stage,
        data=experiment.data.restore(data),
        micro_batch_size=experiment.run.rows_per_microbatch,
        hooks=[reference_hook(experiment), *experiment.hook.values()],
        observed=partial(unlogged_run, experiment, folder),
        steps=experiment.preflight.num_steps,
        vocabulary=experiment.model.config().get_text_config().vocab_size,
    )
