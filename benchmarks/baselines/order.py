"""The samples of every step of a run, in order, for other programs that can train on given samples."""

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.baselines.programs import Work, overrides
from benchmarks.compose import composed
from components.contracts.batch import Batch
from components.contracts.data import BatchShard
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from runner.launch.prepare import prepare
from runner.records.run_record import RunRecord


def write_order(work: Work, data: Path, steps: int, folder: Path) -> Path:
    """Write the tokens of the sequences of each step to a JSON file and return its path.

    Pairs are written as all chosen sides, then all rejected sides. With shared prompts, a rejected side has
    only the tokens that are computed for it. The samples come from a run that is prepared in ``folder`` and
    never started.
    """
    config = composed([*overrides(work, data, steps), "run.name=order", f"run.output_dir={folder}"])
    launch = check_launch(config, ConfigSources(), command=["order"])
    prepared = RunRecord.read(prepare(replace(launch, console=Console(quiet=True)))).data
    run = launch.experiment.run
    loader = (
        build_experiment(config, ConfigSources())
        .data.restore(prepared)
        .train_loader(BatchShard(run.global_batch_size, run.micro_batch_size))
    )
    order = [
        [ids for batch in loader.microbatches(step) for ids in sequences(batch)] for step in range(steps)
    ]
    if work.stage == "dpo":
        order = [[*ids[0::2], *ids[1::2]] for ids in order]
    path = folder / f"order_{work.name}.json"
    path.write_text(json.dumps(order))
    return path


def sequences(batch: Batch) -> list[list[int]]:
    """Return the tokens of each sequence of a packed batch."""
    assert batch.cu_seqlens is not None
    parts = batch.input_ids[0].split(batch.cu_seqlens.diff().tolist())
    return [part.tolist() for part in parts if len(part)]
