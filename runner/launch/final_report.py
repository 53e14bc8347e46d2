"""The final report of a run: paths, metrics, and one completion."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from components.checkpoint import complete_checkpoints
from components.checkpoint.folder import step_of
from components.contracts.errors import TrainingError
from components.preflight import owes_evaluation
from runner.config.command_line import is_sweep, single_job_overrides
from runner.config.instantiate import Experiment
from runner.config.run_config import CheckpointConfig
from runner.launch.run_record import RunRecord, Stopped
from runner.training.rank import DTYPES
from runner.training.run_summary import Results


def print_summary(experiment: Experiment, folder: Path) -> None:
    """Finish the export by adding the tokenizer, and print paths, metrics and a completion on stdout."""
    results = RunRecord.read(folder).results
    facts = {"run folder": str(folder)} | checkpoint_facts(folder) | metric_facts(results)
    if (folder / "export").is_dir():
        facts |= export_facts(experiment, folder)
    print()
    for name, value in facts.items():
        print(f"{name:<12}{value}")


def checkpoint_facts(folder: Path) -> dict[str, str]:
    saved = complete_checkpoints(folder / "checkpoints")
    return {"checkpoint": str(saved[-1])} if saved else {}


def metric_facts(results: Results) -> dict[str, str]:
    facts, last = {}, results.last
    if results.first:
        ends = (results.first, last)
        facts["train loss"] = ", ".join(f"{row['train/loss']:.4f} at step {row['step']:.0f}" for row in ends)
    if "eval/loss" in last:
        facts["eval loss"] = f"{last['eval/loss']:.4f}"
    if "perf/tokens_per_s" in last:
        facts["throughput"] = f"{last['perf/tokens_per_s']:,.0f} tokens/s over the last logged steps"
    return facts


def export_facts(experiment: Experiment, folder: Path) -> dict[str, str]:
    """Finish the export; return its path and its model's completion of the first held-out prompt."""
    run, model, adapter = experiment.run, experiment.model, experiment.adapter
    export, base = folder / "export", folder / "base"
    if adapter is None:
        tokenizer = model.add_tokenizer(export)
    else:
        tokenizer = adapter.finish_export(model, export, base, run.seed, DTYPES[run.dtype])
    facts = {"export": str(export)}
    if run.final_sample_tokens:
        prompt = experiment.data.restore(RunRecord.read(folder).data).prompt()
        answer = model.generate(export, prompt, run.final_sample_tokens)
        facts["prompt"] = repr(tokenizer.decode(prompt))
        facts["completion"] = repr(tokenizer.decode(answer))
    return facts


def print_stopped(
    config: CheckpointConfig,
    folder: Path,
    stopped: Stopped,
    command: Sequence[str],
    overrides: Sequence[str],
) -> bool:
    """Print where a run stopped before its end and how to resume it; return whether it can resume.

    Raises:
        TrainingError: if no checkpoint could be written (``checkpoint.on_error=continue``).
    """
    words = f"stopped at step {stopped.step} ({stopped.reason})"
    saved = complete_checkpoints(folder / "checkpoints")
    if not saved:
        raise TrainingError(f"{words}, and no checkpoint could be written.")
    checkpoint = str(saved[-1])
    if step_of(saved[-1]) != stopped.step:
        words += f", whose checkpoint could not be written: the newest is of step {step_of(saved[-1])}"
    if stopped.step == stopped.of and not owes_evaluation(saved[-1]):
        print(f"{words}, the last one, before its export; checkpoint: {checkpoint}")
        return False
    if config.model_only:
        print(f"{words}; only weights, from which no run can resume: {checkpoint}")
        return False
    print(f"{words}; resume with: {resume_command(command, overrides, checkpoint)}")
    return True


def resume_command(command: Sequence[str], overrides: Sequence[str], checkpoint: str) -> str:
    """Return the user's command, or that of one job of a sweep, with another ``checkpoint.resume``."""
    words = single_job_overrides(overrides, command) if is_sweep(command) else command[1:]
    kept = [word for word in words if not word.startswith("checkpoint.resume=")]
    return shlex.join(["python", "-m", "runner", *kept, f"checkpoint.resume={checkpoint}"])
