"""``preflight.mode=prove``: compare a small version of an experiment in its layout and in one process."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from components.atomic_write import write_atomic
from components.contracts.errors import ConfigError, TrainingError
from components.contracts.json_types import Config, Json
from components.contracts.parallelism import ParallelismSpec
from components.preflight.checks import check_steps
from components.preflight.forecast_report import tabulate
from components.proof.small_experiment import small_adapter, small_data, small_model
from components.proof.small_layout import SIZES, STAGES, resized, size_names, small_layouts
from components.proof.steps import ONE_PROCESS
from components.proof.verdict import BOUND, Errors, compare
from runner.config.instantiate import build_experiment
from runner.launch.checks import RunPreparation, check_parts
from runner.launch.spawn import run_workers
from runner.logging_setup import log_to
from runner.training.proof_rank import proof_run

MOST_ROWS = 4
"""Largest micro-batch of a proof, in rows."""
NOT_SHOWN = ("model.path", "model.architecture", "model.tokenizer", "model.chat_template", "run.device")


def print_proof(launch: RunPreparation) -> float:
    """Compare the layout with one process, and print and save the relative errors; return NaN as the loss.

    Raises:
        ConfigError: if the experiment is wrong, no small version of it can be trained on CPU ranks, or it has
            fewer steps than the proof.
        TrainingError: if a rank fails, an error is above the bound, or the error of the control is not.
    """
    launch.check_layout(check_parts(launch.experiment), launch.experiment.adapter)
    small, changed = shrink(launch)
    run, rows = small.experiment.run, small.experiment.run.rows_per_microbatch
    other = 2 if rows == 1 else 1
    composed = replace(small.experiment, model=launch.experiment.model)  # the small one has no tokenizer
    with log_to(None, launch.console):
        prepared = replace(small, experiment=composed).prepare_data()
    check_steps(launch.experiment.preflight.num_steps, prepared.num_steps)
    data = prepared.to_json()
    folder = small.preflight_folder()
    one = replace(small.experiment, parallelism=ONE_PROCESS)
    of_size = (replace(one, run=replace(run, micro_batch_size=size)) for size in (other, rows))
    runs = [proof_run(experiment, folder, data) for experiment in of_size]
    reference, same_rows = folder / f"rows_{other}", folder / f"rows_{rows}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slower on a small model
    try:
        lr = runs[0].peak_lr()
        runs[0].take(reference, lr)
        runs[1].take(same_rows, lr)
    finally:
        torch.set_num_threads(threads)
    changed.append(
        {"key": "optimizer.lr", "composed": f"{small.experiment.optimizer.lr:.1e}", "proof": f"{lr:.1e}"}
    )
    (folder / "proof.json").write_text(json.dumps({"data": data, "lr": lr}))
    run_workers(folder, small.world_size)
    ranks = f"{small.world_size} rank" + "s" * (small.world_size > 1)
    name = " ".join([*size_names(small.experiment.parallelism), ranks])
    found = [
        compare(f"one process, {rows} rows", same_rows, reference),
        compare(name, folder / "layout", reference),
        compare("control: must differ", folder / "layout", reference, control=True),
    ]
    report = {"changed": changed, "bound": BOUND, "proof": [asdict(errors) for errors in found]}
    write_atomic(folder / "preflight.json", json.dumps(report, indent=2) + "\n")
    table = [errors.row() for errors in found]
    launch.console.print(tabulate("changed for the proof", changed), tabulate("proof", table), sep="\n")
    launch.console.print(f"preflight folder: {folder}", soft_wrap=True, highlight=False)
    conclude(found, rows, other)
    launch.console.print(
        f"The gradients and curves of this layout are those of one process, to {BOUND:.0e} of their size."
    )
    return math.nan


def conclude(found: Sequence[Errors], rows: int, other: int) -> None:
    """Raise TrainingError unless the control, the last of ``found``, differs and the other two agree.

    Each of them was compared with one process that has ``other`` rows in a micro-batch. The first is one
    process with ``rows`` rows, and the second is the layout.
    """
    one_process, layout, control = found
    if control.equal:
        raise TrainingError(
            "preflight.mode=prove: the control, which divides the loss by the labels of each micro-batch, "
            "has the same gradients, so that this proof shows nothing; use data with more rows."
        )
    if not one_process.equal:
        raise TrainingError(
            f"preflight.mode=prove: {other} and {rows} rows in a micro-batch differ in one process already, "
            f"{one_process.worst} (bound {BOUND:.0e}); the loss must return sums, which the engine divides "
            "by its counts."
        )
    if not layout.equal:
        raise TrainingError(
            f"preflight.mode=prove: this layout differs from one process, {layout.worst} (bound {BOUND:.0e})."
        )


def shrink(launch: RunPreparation) -> tuple[RunPreparation, list[Json]]:
    """Return a small version of the run that passes all checks, and a row for each key that it changes.

    Raises:
        ConfigError: if no small layout passes; the error is that of the first one, with a sentence about
            layers that the small model lacks.
    """
    refusals: list[ConfigError] = []
    for layout in small_layouts(launch.experiment.parallelism):
        try:
            return with_layout(launch, layout)
        except ConfigError as error:
            refusals.append(error)
    text = str(refusals[0])
    if "matches no" not in text or launch.experiment.preflight.shrink.layers is None:
        raise refusals[0]
    raise ConfigError(
        f"{text} The proof has a smaller model; if that lacks the layer, use preflight.shrink.layers=null."
    ) from refusals[0]


def with_layout(launch: RunPreparation, layout: ParallelismSpec) -> tuple[RunPreparation, list[Json]]:
    """Return ``launch`` with ``layout`` and a small model, and a row for each changed key.

    Raises:
        ConfigError: if the small run fails a check, in its layout or in one process.
    """
    experiment, config, limits = launch.experiment, launch.config, launch.experiment.preflight.shrink
    cache, run, stage = experiment.data.cache(), config["run"], config["stage"]
    model, old, new = small_model(experiment.model, config["model"], limits, layout, cache)
    if new.get("num_hidden_layers") != old.get("num_hidden_layers"):
        layout = resized(layout, {}) or layout
    rows = 2 if run["micro_batch_size"] == "auto" else min(run["micro_batch_size"], MOST_ROWS)
    ranks = layout.world_size({}, 0)
    others = experiment.stage.reference == "precomputed" or stage.get("reference_path")
    # A frozen copy of a quantised model is refused, because it would be in full precision.
    choice = "adapter_off" if getattr(experiment.adapter, "quantize", None) else "frozen"
    own: Json = {"reference": choice, "reference_path": None} if others else {}
    described = {key: value for key, value in model.items() if key != "moe"}
    adapter = small_adapter(experiment.adapter, config["adapter"], replace(experiment.model, **described))
    if others and choice == "adapter_off":
        adapter["modules_to_save"] = None  # otherwise the reference could not be the base model
    names = [] if layout == experiment.parallelism else [*SIZES, *STAGES, "dp_shard"]
    nodes: Mapping[str, Json] = {
        "model": model,
        "parallelism": {name: getattr(layout, name) for name in names if hasattr(layout, name)},
        "adapter": adapter,
        "data": small_data(experiment.data, config["data"], limits),
        "stage": {key: value for key, value in own.items() if key in stage},
        "checkpoint": {"init_from": None},
        "run": {
            "device": "cpu",
            "dtype": "fp32",
            "compile": False,
            "kernels": "auto",
            "micro_batch_size": rows,
            "global_batch_size": 2 * rows * layout.dp_size(ranks),
        },
    }
    before = {**config, "parallelism": vars(experiment.parallelism)}
    changed = [*differences("model.architecture", old, new)]
    changed += [row for node, keys in nodes.items() for row in differences(node, before[node], keys)]
    left_out = {
        name for name, hook in experiment.hook.items() if hook.needs_evaluations or hook.generates_text
    }
    changed += [
        {"key": f"hook.{name}", "composed": "given", "proof": "left out"} for name in sorted(left_out)
    ]
    small = {**config, **{node: {**config[node], **keys} for node, keys in nodes.items()}}
    small["hook"] = {name: options for name, options in config["hook"].items() if name not in left_out}
    proved = build_experiment(small, launch.where)
    found = replace(launch, config=small, experiment=proved, reference=proved.reference, world_size=ranks)
    found.check_components()
    replace(found, experiment=replace(proved, parallelism=ONE_PROCESS), world_size=1).check_components()
    return found, changed


def differences(name: str, old: Config, new: Json) -> Iterator[Json]:
    """Yield a row for each key of ``new`` whose value differs from ``old``.

    Lists are left out, because they follow from other keys.
    """
    for key, value in new.items():
        known, before = f"{name}.{key}", old.get(key)
        if isinstance(value, dict):
            yield from differences(known, before if isinstance(before, Mapping) else {}, value)
        elif before != value and not isinstance(value, list) and known not in NOT_SHOWN:
            shown = [v if isinstance(v, str) else json.dumps(v, default=str) for v in (before, value)]
            yield {"key": known, "composed": shown[0], "proof": shown[1]}
