"""Translate the options of another tool's configuration: see ``runner.commands.import_config``."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from runner.commands.importing.data_of_axolotl import axolotl_datasets
from runner.commands.importing.data_of_llamafactory import choose_template, dataset_info
from runner.commands.importing.data_of_trl import hub_dataset
from runner.commands.importing.options import translate_option
from runner.commands.importing.run_options import (
    choose_batch,
    choose_cadences,
    choose_optimizer,
    choose_schedule,
)
from runner.commands.importing.stage_options import (
    choose_adapter,
    choose_loss,
    choose_model,
    choose_reference,
    choose_saved_adapter,
    choose_stage,
)
from runner.commands.importing.translation import Translation, as_list
from runner.conf_folder import keys_of
from runner.config.unknown_keys import dictionary, documents

TOOLS: Mapping[str, Callable[[Translation], None]] = {
    "llamafactory": dataset_info,
    "axolotl": axolotl_datasets,
    "trl": hub_dataset,
}
"""Tool -> the function that translates its options of data."""
GROUPS = ("stage", "model", "data", "adapter", "parallelism", "optimizer", "scheduler", "run")
"""The order of the groups in the command."""
STRATEGIES = ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy")
"""Options whose value may be the word ``no``."""


def translate(tool: str, options: Config, ranks: int | None, stage: str | None, file: str) -> Translation:
    """Return the command for the options of ``tool``; ``file`` is their source, for messages.

    Raises:
        ConfigError: if an option is probably misspelt or has a wrong value, the model, the data or the stage
            is missing, the stage does not exist here, or a file of LLaMA-Factory is not for training.
    """
    given = {name: value for name, value in options.items() if value is not None and value != ""}
    # YAML reads the strategy "no" as false.
    given |= {name: "no" for name in STRATEGIES if given.get(name) is False}
    work = Translation(tool, given)
    work.needless = {name: "it has no value" for name in options if name not in given}
    if tool == "trl" and "max_length" in work.needless:
        del work.needless["max_length"]
        work.checks["data.max_length"] = "null means no limit in TRL; give the tokens of the longest sample"
    check_names(work, file)
    if tool == "llamafactory":
        check_trains(given, file)
    work.left = documents()[1][tool]["defaults"] | {n: v for n, v in given.items() if n not in work.unknown}
    choose_stage(work, stage, file)
    extra = documents()[1][tool]["stage_defaults"].get(work.words["stage"], {})
    work.left |= {name: value for name, value in extra.items() if name not in given}
    choose_loss(work)
    choose_reference(work)
    choose_model(work)
    choose_saved_adapter(work)
    choose_adapter(work)
    choose_batch(work, ranks)
    choose_optimizer(work)
    choose_schedule(work)
    choose_cadences(work)
    if work.tool == "llamafactory":
        choose_template(work)
    if "data_seed" in work.given and work.given.get("seed") not in (None, work.given["data_seed"]):
        work.missing[f"seed={work.given['seed']}"] = "run.seed, which data_seed sets, is that of everything"
        work.left["seed"] = work.left.pop("data_seed")
    TOOLS[tool](work)
    choose_loggers(work)
    choose_plugins(work)
    for name in list(work.left):
        translate_option(work, name)
    leave_out_other_metric(work)
    leave_out_of_adapter(work)
    leave_out_of_streams(work)
    name_runs(work)
    if "data.eval" not in work.checks and not {*EVALUATED} & {*work.words}:
        leave_out_evaluations(work)
    if "checkpoint.keep_best" in work.words:
        work.checks["checkpoint.keep_best"] = (
            "the export of a run is of its last step; the summary of the run has the command for the best"
        )
    leave_out_unread(work)
    places = {key: (*(key.split(".")[0] != group for group in GROUPS), "." in key) for key in work.words}
    work.words = {key: work.words[key] for key in sorted(work.words, key=places.__getitem__)}
    return work


def check_names(work: Translation, file: str) -> None:
    """Raise ConfigError if an option is probably misspelt, and report other unknown options as missing."""
    tables = (dictionary()[table] for table in documents()[1][work.tool]["tables"])
    known = [word for table in tables for word in table]
    for name in work.given:
        kinds = [work.reason(kind, name, exact=False) for kind in ("not_needed", "no_equivalent")]
        if any(kinds) or work.row(name) is not None:
            continue
        if near := get_close_matches(name, known, n=1, cutoff=0.85):
            raise ConfigError(
                f"{name} ({file}): is not a known option of {work.tool}; did you mean '{near[0]}'?"
            )
        work.lacks(name, f"it is not a known option of {work.tool}")
        work.unknown.add(name)


def check_trains(given: Config, file: str) -> None:
    """Raise ConfigError, with what to use instead, if a file of LLaMA-Factory is not for training."""
    start = given.get("adapter_name_or_path") or given.get("model_name_or_path", "DIR")
    if "export_dir" in given:
        command = f"python -m runner.export adapter={start} merge=true output={given['export_dir']}"
        raise ConfigError(f"export_dir ({file}): this file merges an adapter; use {command}.")
    if given.get("do_predict") and not given.get("do_train"):
        command = f"python -m runner.generate checkpoint={start} prompts=FILE output=FILE"
        raise ConfigError(f"do_predict ({file}): this file completes prompts; use {command}.")
    if "dataset" not in given:
        command = f"python -m runner.chat checkpoint={start}"
        raise ConfigError(f"dataset ({file}): is missing; add it, or, to chat with the model, use {command}.")


EVALUATED = ("data.eval", "data.eval_dataset", "data.eval_fraction", "data.eval_split")
"""Keys, any one of which gives a run data to evaluate on."""
OF_ADAPTER = (
    *("r", "alpha", "target_modules", "rslora", "modules_to_save", "dora", "init_lora_weights"),
    "pissa_niter",
)
"""Keys of the group ``adapter`` whose values a saved adapter has."""


def leave_out_of_adapter(work: Translation) -> None:
    """Remove the overrides that a saved adapter (``adapter.path``) decides."""
    if "adapter.path" not in work.words:
        return
    for key in (f"adapter.{name}" for name in OF_ADAPTER):
        if work.words.pop(key, None) is not None:
            work.checks.pop(key, None)
            work.needless.update(dict.fromkeys(work.names_of(key), "the saved adapter has it"))


def choose_loggers(work: Translation) -> None:
    """Set ``logger`` if a tracker is chosen, or has options."""
    named = {str(name) for name in as_list(work.take("report_to"))}
    if work.left.get("wandb_mode") == "disabled":
        for name in [name for name in work.left if name == "use_wandb" or name.startswith("wandb_")]:
            work.skip(name, "wandb_mode=disabled turns it off")
    wandb = work.take("use_wandb") or any(name.startswith("wandb_") for name in work.left)
    chosen = {"wandb": bool(wandb) or "wandb" in named, "tensorboard": "tensorboard" in named}
    chosen["tensorboard"] |= bool(work.take("use_tensorboard"))
    if any(chosen.values()):
        names = ["jsonl", "console", *(name for name, used in chosen.items() if used)]
        work.words["logger"] = f"[{','.join(names)}]"
    for name in sorted(named - {"none", "wandb", "tensorboard"}):
        work.missing[f"report_to={name}"] = "use logger=[jsonl,console,wandb]"


PLUGINS = {
    "LigerPlugin": "the options liger_* choose the kernels",
    "CutCrossEntropyPlugin": "cross entropy is computed in chunks in any case",
}
"""Class of a plugin of axolotl -> why it needs no option here."""


def choose_plugins(work: Translation) -> None:
    """Record the plugins that need no option; any other ones remain to be translated."""
    kinds = {str(plugin): str(plugin).rpartition(".")[2] for plugin in as_list(work.take("plugins"))}
    work.needless |= {f"plugins: {kind}": PLUGINS[kind] for kind in kinds.values() if kind in PLUGINS}
    for plugin in (plugin for plugin, kind in kinds.items() if kind not in PLUGINS):
        work.missing[f"plugins: {plugin}"] = str(work.reason("no_equivalent", "plugins", exact=True))


def leave_out_other_metric(work: Translation) -> None:
    """Remove what would watch the loss, in the direction of another metric, which does not exist here."""
    if not any(name.startswith("metric_for_best_model=") for name in work.missing):
        return
    for key in [key for key in work.words if key.startswith(("checkpoint.keep_best", "early_stopping."))]:
        del work.words[key]
        for name in {*work.names_of(key)} - {"metric_for_best_model"}:
            work.lacks(name, "it is of a metric that does not exist here")


def leave_out_of_streams(work: Translation) -> None:
    """Remove the overrides that count epochs of a stream, or that only a stream reads."""
    is_read = "streaming" in keys_of("data", str(work.words["data"]))
    if work.words.get("data.streaming") is not True or not is_read:
        if work.words.pop("data.buffer_size", None) is not None:
            work.needless.update(dict.fromkeys(work.names_of("data.buffer_size"), "it is that of a stream"))
        return
    for key in ("data.eval_fraction", "data.drop_last"):
        if work.words.pop(key, None) is not None:
            for name in work.names_of(key):
                work.lacks(name, f"a stream has no {key}; give data.eval for evaluations")
    for key in [key for key in work.words if key.endswith("_every_epochs") or key == "run.epochs"]:
        del work.words[key]
        steps = "run.max_steps" if key == "run.epochs" else key.removesuffix("_epochs")
        work.checks[steps] = "a stream has no epochs; give the number of steps"


def name_runs(work: Translation) -> None:
    """Add a note to paths that may be the ``output_dir`` of another command of that tool."""
    for key in ("adapter.path", "model.path", "stage.reference_path"):
        path = Path(str(work.words.get(key, "")))
        is_local = path.is_absolute() or path.parts[:1] == ("saves",) or len(path.parts) > 2  # no hub id
        is_saved = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
        if is_local and not is_saved:
            work.checks[key] = "if an earlier training writes this folder, give RUN/export of that run here"


def leave_out_evaluations(work: Translation) -> None:
    """Remove the overrides that need evaluations, for which no data is left."""
    for key in list(work.words):
        if key.startswith(("run.eval_every", "run.eval_on_start", "checkpoint.keep_best", "early_stopping.")):
            del work.words[key]
            work.checks.pop(key, None)
            work.needless.update(dict.fromkeys(work.names_of(key), "there is no evaluation data"))


def leave_out_unread(work: Translation) -> None:
    """Remove the overrides of keys that the chosen option of their group does not have."""
    chosen = {"parallelism": "single", "scheduler": "cosine", "optimizer": "adamw", "adapter": "none"}
    for key in list(work.words):
        group, _, rest = key.partition(".")
        if not rest or group in ("run", "checkpoint", "early_stopping", "logger"):
            continue
        option = str(work.words.get(group) or chosen[group])
        if rest.split(".")[0] not in keys_of(group, option):
            for name in work.names_of(key):
                why = f"{group}={option} does not read {key}"
                work.lacks(name, why) if group == "data" else work.needless.update({name: why})
            del work.words[key]
