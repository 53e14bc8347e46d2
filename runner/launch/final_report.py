"""The final report of a run: paths, metrics, and one completion."""

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from components.checkpoint import complete_checkpoints
from components.checkpoint.folder import best_checkpoint
from components.contracts.loss import Loss
from components.preflight.estimates.device_specs import machine_memory
from components.preflight.formatting import as_size
from runner.config.command_line import hydra_value, single_job_overrides
from runner.config.instantiate import Experiment
from runner.config.sources import ConfigSources
from runner.launch.checks import RunPreparation
from runner.records.run_record import RunRecord, Stopped
from runner.records.run_summary import Results
from runner.training.assembly import DTYPES


def print_summary(experiment: Experiment, folder: Path, record: RunRecord, saved: Path | None) -> None:
    """Finish the export by adding the tokenizer, and print paths, metrics and a completion on stdout.

    ``saved`` is the newest checkpoint. None means that there is no checkpoint.
    """
    evaluates = experiment.run.evaluate_only
    facts = {"run folder": str(folder)}
    facts |= {"checkpoint": str(saved or "none")} if saved or not evaluates else weights_origin(experiment)
    best = best_checkpoint(folder / "checkpoints") if experiment.checkpoint.keep_best else None
    if best is not None:
        command = shlex.join(["python", "-m", "runner.export", f"checkpoint={best}", "output=DIR"])
        facts["best"] = f"{best} by {experiment.checkpoint.keep_best}; the export is of the last step, and "
        facts["best"] += f"{command} makes one of the best"
    if evaluates:
        facts |= evaluation_facts(record.results, experiment.stage)
    else:
        facts |= metric_facts(record.results)
    # The folder may have the export of an earlier end of the run.
    if experiment.run.export and not evaluates and (folder / "export").is_dir():
        facts |= export_facts(experiment, folder, record)
    width = max(map(len, facts)) + 2
    print()
    for name, value in facts.items():
        print(f"{name:<{width}}{value}")


def weights_origin(experiment: Experiment) -> dict[str, str]:
    """Return where the weights of an evaluation without a checkpoint come from."""
    model, adapter = experiment.model, experiment.adapter
    own = {} if adapter is None or adapter.path is None else {"adapter": adapter.path}
    return {"weights": model.describe_init, **own}


def newest_checkpoint(folder: Path, record: RunRecord) -> Path | None:
    """Return the newest complete checkpoint of the run, or else the one that the run resumed from.

    None means that there is neither.
    """
    saved = complete_checkpoints(folder / "checkpoints")
    return saved[-1] if saved else record.checkpoint


def metric_facts(results: Results) -> dict[str, str]:
    facts, last = {}, results.last
    if results.first and "train/loss" in last:
        ends = (results.first, last)
        facts["train loss"] = ", ".join(f"{row['train/loss']:.4f} at step {row['step']:.0f}" for row in ends)
    if results.diverged or "eval/loss" in last:
        facts["eval loss"] = "not finite" if results.diverged else f"{last['eval/loss']:.4f}"
    if "perf/tokens_per_s" in last:
        facts["throughput"] = f"{last['perf/tokens_per_s']:,.0f} tokens/s over the last logged steps"
    return facts


def evaluation_facts(results: Results, stage: Loss) -> dict[str, str]:
    """Return all metrics of an evaluation, and the perplexity of each set if losses are means over tokens."""
    found = {key: value for key, value in results.last.items() if key.startswith("eval/")}
    found["eval/loss"] = results.final_loss()
    if stage.kind in ("text", "chat") and getattr(stage, "normalize", "token") == "token":
        for part in [key.removesuffix("loss") for key in found if key.endswith("/loss")]:
            loss = found.get(f"{part}nll", found[f"{part}loss"])  # the loss may have further terms
            found[f"{part}perplexity"] = math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
    return {key: f"{value:.6g}" for key, value in sorted(found.items())}


def export_facts(experiment: Experiment, folder: Path, record: RunRecord) -> dict[str, str]:
    """Finish the export; return its path and the exported model's completion of the first held-out prompt."""
    run, model, adapter = experiment.run, experiment.model, experiment.adapter
    export, base = folder / "export", folder / "base"
    if adapter is None:
        tokenizer = model.add_tokenizer(export)
    else:
        tokenizer = adapter.finish_export(model, export, base, run.seed, DTYPES[run.dtype])
    facts = {"export": str(export)}
    if run.final_sample_tokens and not model.scalar_head:
        prompt = experiment.data.restore(record.data).prompt()
        facts["prompt"] = repr(tokenizer.decode(prompt))
        facts["completion"] = completion(experiment, export, prompt)
    return facts


def completion(experiment: Experiment, export: Path, prompt: list[int]) -> str:
    """Return the exported model's completion of ``prompt``, or why it is left out: the model is too large.

    The model is loaded into the memory of the host, which nothing forecasts, and the run has trained already.
    """
    run, model = experiment.run, experiment.model
    quantized = getattr(experiment.adapter, "quantize", None) is not None  # its base is exported in fp32
    each = 4 if quantized else DTYPES[run.dtype].itemsize
    size = sum(weight.numel() for weight in model.meta_model.parameters()) * each
    free = min(machine_memory(), psutil.virtual_memory().available)
    if size > free / 2:
        return f"left out: the weights take {as_size(size)}, over half of the free memory ({as_size(free)})"
    answer = model.generate(export, prompt, run.final_sample_tokens)
    return repr(model.load_tokenizer().decode(answer))


def print_stopped(launch: RunPreparation, stopped: Stopped, saved: Path | None) -> bool:
    """Print at which step a run stopped early and how to resume it; return whether it can be resumed.

    ``saved`` is the newest checkpoint of the run. None means that there is none.
    """
    words = f"stopped at step {stopped.step} ({stopped.reason})"
    if saved is None:
        print(f"{words}, without a checkpoint")
        return False
    if launch.experiment.checkpoint.model_only:
        export = f"python -m runner.export checkpoint={hydra_value(str(saved))} output=DIR"
        print(f"{words}; only weights, from which no run can resume: {saved}; to export them: {export}")
        return False
    print(f"{words}; resume with: {resume_command(launch.command, launch.where, str(saved))}")
    return True


def resume_command(command: Sequence[str], where: ConfigSources, checkpoint: str) -> str:
    """Return the user's command, or that of one job of a sweep, with another ``checkpoint.resume``."""
    words = command[1:] if where.sweep_job is None else single_job_overrides(where.overrides, command)
    kept = [word for word in words if not word.startswith("checkpoint.resume=")]
    return shlex.join(["python", "-m", "runner", *kept, f"checkpoint.resume={hydra_value(checkpoint)}"])
