"""The closing words of a run: where things are, how it went, and one completion."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.checkpoint import complete_checkpoints
from components.checkpoint.folder import step_of
from components.preflight import owes_evaluation
from runner.build import Experiment
from runner.errors import TrainingError
from runner.folder import read_facts
from runner.schema import RunConfig
from runner.train import DTYPES

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_value(rows: list[Row], key: str) -> float:
    """NaN where it was never logged."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(values[-1]) if values else math.nan


def final_loss(folder: Path) -> float:
    """The last eval loss, else the last train loss."""
    rows = read_rows(folder)
    evaluated = last_value(rows, "eval/loss")
    return last_value(rows, "train/loss") if math.isnan(evaluated) else evaluated


def summarize(experiment: Experiment, folder: Path) -> None:
    """Finishes the export (the tokenizer belongs to it) and prints what a user wants to know, on stdout."""
    facts = {"run folder": str(folder)} | checkpoint_facts(folder) | metric_facts(read_rows(folder))
    if (folder / "export").is_dir():
        facts |= export_facts(experiment, folder)
    print()
    for name, value in facts.items():
        print(f"{name:<12}{value}")


def checkpoint_facts(folder: Path) -> dict[str, str]:
    saved = complete_checkpoints(folder / "checkpoints")
    return {"checkpoint": str(saved[-1])} if saved else {}


def metric_facts(rows: list[Row]) -> dict[str, str]:
    facts = {}
    losses = [(row["step"], row["train/loss"]) for row in rows if row.get("train/loss") is not None]
    if losses:
        facts["train loss"] = ", ".join(
            f"{loss:.4f} at step {step}" for step, loss in (losses[0], losses[-1])
        )
    if not math.isnan(evaluated := last_value(rows, "eval/loss")):
        facts["eval loss"] = f"{evaluated:.4f}"
    if not math.isnan(rate := last_value(rows, "perf/tokens_per_s")):
        facts["throughput"] = f"{rate:,.0f} tokens/s over the last logged steps"
    return facts


def export_facts(experiment: Experiment, folder: Path) -> dict[str, str]:
    """Where the export is, and what its model makes of the first held-out prompt."""
    run, model, adapter = experiment.run, experiment.model, experiment.adapter
    export, base = folder / "export", folder / "base"
    if adapter is None:
        tokenizer = model.add_tokenizer(export)
    else:
        tokenizer = adapter.finish_export(model, export, base, run.seed, DTYPES[run.dtype])
    facts = {"export": str(export)}
    if run.sample_tokens:
        prompt = experiment.data.restore(read_facts(folder)["data"]).prompt()
        answer = model.complete(export, prompt, run.sample_tokens)
        facts["prompt"] = repr(tokenizer.decode(prompt))
        facts["completion"] = repr(tokenizer.decode(answer))
    return facts


def say_stopped(
    run: RunConfig,
    folder: Path,
    stopped: Mapping[str, Any],
    command: Sequence[str],
    overrides: Sequence[str],
) -> None:
    """Where a run has stopped before its end, and how it goes on.

    Raises:
        TrainingError: nothing could be saved (``run.on_save_error=continue``).
    """
    words = f"stopped at step {stopped['step']} ({stopped['reason']})"
    saved = complete_checkpoints(folder / "checkpoints")
    if not saved:
        raise TrainingError(f"{words}, and no checkpoint could be written.")
    checkpoint = str(saved[-1])
    if step_of(saved[-1]) != stopped["step"]:
        words += f", whose checkpoint could not be written: the newest is of step {step_of(saved[-1])}"
    if stopped["step"] == stopped["of"] and not owes_evaluation(saved[-1]):
        print(f"{words}, the last one, before its export; checkpoint: {checkpoint}")
    elif run.save_model_only:
        print(f"{words}; weights alone, from which nothing can resume: {checkpoint}")
    else:
        print(f"{words}; resume with: {resume_command(command, overrides, checkpoint)}")


def resume_command(command: Sequence[str], overrides: Sequence[str], checkpoint: str) -> str:
    """The user's own, or that of one job of a sweep, with another ``run.resume``."""
    sweep = {"-m", "--multirun"} & set(command)
    kept = [word for word in (overrides if sweep else command[1:]) if not word.startswith("run.resume=")]
    return shlex.join(["python", "-m", "runner", *kept, f"run.resume={checkpoint}"])
