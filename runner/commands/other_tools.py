"""Translate the options of another tool's configuration: see ``runner.commands.import_config``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from runner.cli import config_dir, keys_of
from runner.config.sources import did_you_mean
from runner.config.unknown_keys import Counterpart, dictionary, documents

TOOLS = ("llamafactory", "axolotl", "trl")
GROUPS = ("stage", "model", "data", "adapter", "parallelism", "optimizer", "scheduler", "run")
"""The order of the groups in the command."""
ADAPTERS = ("none", "lora", "qlora", "dora")
"""Options of the group ``adapter``, in ascending order of precedence if several are chosen."""
OFF = "(off)"
LISTS = ("adapter.target_modules", "adapter.modules_to_save")
COMBINED = ("stage.loss", "stage.loss_weights")
"""Keys whose value may be a list with several entries."""
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request."
)
"""The first paragraph of a prompt of Stanford Alpaca without an input."""
FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "input_output": "segments"}
"""Type of an axolotl data set -> our format. Types that begin with ``chat_template`` are not among them."""
STRATEGIES = ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy")
"""Options whose value may be the word ``no``."""
FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")


@dataclass
class Translation:
    """The translated command, and the options of the file that it leaves out."""

    tool: str
    given: Json
    """The options of the file that have a value, under their own names."""
    left: Json = field(default_factory=dict)
    """Options and defaults that are still to be translated."""
    words: dict[str, object] = field(default_factory=dict)
    """The overrides of the command, by key."""
    checks: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)

    def take(self, *names: str) -> Any:
        """Remove options, and return the value of the first one that is set. None means that none is."""
        found = [self.left.pop(name, None) for name in names]
        return next((value for value in found if value is not None), None)

    def number(self, *names: str) -> float | None:
        """Remove options as ``take`` does, and return the value as a float.

        Raises:
            ConfigError: if the value is not a number.
        """
        value = self.take(*names)
        return None if value is None else as_number(names[0], value)

    def lacks(self, name: str, why: str) -> None:
        """Record that an option of the file has no equivalent; a default value needs no record."""
        if name in self.given:
            self.missing[f"{name}={' '.join(str(self.given[name]).split())[:80]}"] = why

    def skip(self, name: str, why: str) -> None:
        """Remove an option and, if the file gives it, record that it is not needed."""
        self.left.pop(name, None)
        self.needless |= {name: why} if name in self.given else {}

    def row(self, name: str) -> Counterpart | None:
        tables = (dictionary()[table] for table in documents()[1][self.tool]["tables"])
        return next((table[name] for table in tables if name in table), None)

    def names_of(self, key: str) -> list[str]:
        """Return the options of the file whose equivalent is ``key``."""
        rows = ((name, self.row(name)) for name in self.given)
        return [name for name, row in rows if row is not None and row.here.partition("=")[0] == key]

    def reason(self, kind: str, name: str, *, exact: bool) -> str | None:
        """Return why an option is ``not_needed`` or has ``no_equivalent``. None means that it is neither.

        With ``exact``, entries that are patterns do not count.
        """
        for where in (self.tool, "common"):
            for pattern, why in documents()[1][where][kind].items():
                if name == pattern or (not exact and fnmatch(name, pattern)):
                    return str(why)
        return None


def as_number(name: str, value: Any) -> float:
    """Return the value of an option as a float, or raise ConfigError if it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: must be a number, got {value}; correct it.")
    return number


def translate(tool: str, options: Config, ranks: int | None, stage: str | None, file: str) -> Translation:
    """Return the command for the options of ``tool``; ``file`` is their source, for messages.

    Raises:
        ConfigError: if an option is unknown or has a wrong value, the model, the data or the stage is
            missing, the stage does not exist here, or a file of LLaMA-Factory is not for training.
    """
    given = {name: value for name, value in options.items() if value is not None and value != ""}
    # YAML reads the strategy "no" as false.
    given |= {name: "no" for name in STRATEGIES if given.get(name) is False}
    work = Translation(tool, given)
    work.needless = {name: "it has no value" for name in options if name not in given}
    if tool == "trl" and "max_length" in work.needless:
        del work.needless["max_length"]
        work.checks["data.max_length"] = "null means no limit in TRL; give the tokens of the longest sample"
    check_names(work, options, file)
    if tool == "llamafactory":
        check_trains(given, file)
    work.left = documents()[1][tool]["defaults"] | given
    choose_stage(work, stage, file)
    extra = documents()[1][tool]["stage_defaults"].get(work.words["stage"], {})
    work.left |= {name: value for name, value in extra.items() if name not in given}
    choose_model(work)
    choose_adapter(work)
    choose_batch(work, ranks)
    choose_schedule(work)
    choose_cadences(work)
    if "adapter_name_or_path" in work.given and work.words["stage"] in ("dpo", "kto"):
        work.words["stage.reference"] = "adapter_off"
        work.checks["stage.reference"] = "the reference is the model without the adapter, as in LLaMA-Factory"
    if work.tool == "llamafactory" and work.given.get("template") == "alpaca":
        work.take("template")
        write_alpaca(work, "LLaMA-Factory puts an empty line after an answer, and this template one newline")
    elif work.tool == "llamafactory" and work.given.get("template") not in (None, "llama3", "chatml"):
        work.skip("template", "the template of the tokenizer is used; compare it, see docs/data.md")
    elif work.tool == "llamafactory" and "template" in work.given:
        work.checks["model.chat_template"] = "leave it out if the tokenizer has this template itself"
    {"llamafactory": dataset_info, "axolotl": axolotl_datasets, "trl": hub_dataset}[tool](work)
    for name in list(work.left):
        translate_option(work, name)
    if any(name.startswith("metric_for_best_model=") for name in work.missing):
        for key in [key for key in work.words if key.startswith(("checkpoint.keep_best", "early_stopping."))]:
            del work.words[key]  # they would watch the loss, in the direction of the other metric
    leave_out_of_adapter(work)
    name_runs(work)
    if "data.eval" not in work.checks and not {*EVALUATED} & {*work.words}:
        leave_out_evaluations(work)
    if "checkpoint.keep_best" in work.words:
        work.checks["checkpoint.keep_best"] = (
            "the export of a run is of its last step; the summary of the run has the command for the best"
        )
    if any(key.startswith("logger.wandb.") for key in work.words):
        work.words["logger"] = "[jsonl,console,wandb]"
    leave_out_unread(work)
    places = {key: (*(key.split(".")[0] != group for group in GROUPS), "." in key) for key in work.words}
    work.words = {key: work.words[key] for key in sorted(work.words, key=places.__getitem__)}
    return work


def check_names(work: Translation, options: Config, file: str) -> None:
    for name in options:
        kinds = [work.reason(kind, name, exact=False) for kind in ("not_needed", "no_equivalent")]
        if not any(kinds) and work.row(name) is None:
            tables = (dictionary()[table] for table in documents()[1][work.tool]["tables"])
            hint = did_you_mean(name, [word for table in tables for word in table])
            near = hint if hint.startswith("did") else "correct it, or leave it out if it does not matter."
            raise ConfigError(f"{name} ({file}): is not a known option of {work.tool}; {near}")


def check_trains(given: Config, file: str) -> None:
    """Raise ConfigError, with what to use instead, if a file of LLaMA-Factory cannot be translated.

    It cannot if it is not for training, or has ``finetuning_type: freeze``.
    """
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
    if given.get("finetuning_type") == "freeze":
        raise ConfigError(
            f"finetuning_type ({file}): freeze counts layers, and here they are named; give full, and add "
            "model.train_only=['model.layers.31.*', ...] to the command."
        )


def translate_option(work: Translation, name: str) -> None:
    """Translate an option of ``left`` by its row in the dictionary, or record why it has none."""
    value = work.left.pop(name)
    needless, lacking = (work.reason(kind, name, exact=True) for kind in ("not_needed", "no_equivalent"))
    row = None if needless or lacking else work.row(name)
    if row is not None:
        key, _, switched = row.here.partition("=")
        ours = ours_of(row, key, switched, value)
        if ours is None:
            work.lacks(name, f"use {row.here}{f' ({row.remark})' if row.remark else ''}")
        elif ours != OFF:
            work.words[key] = ours
        elif name in work.given:
            work.needless[name] = f"it is the default without {row.here}" if switched else "it is the default"
    elif needless := needless or (None if lacking else work.reason("not_needed", name, exact=False)):
        work.needless[name] = needless
    else:
        work.lacks(name, lacking or str(work.reason("no_equivalent", name, exact=False)))


def ours_of(row: Counterpart, key: str, switched: str, value: object) -> object:
    """Return the value of our ``key`` that is equivalent to ``value`` of the other tool's option.

    None means that ``value`` cannot be converted, OFF that the key need not be set. ``switched`` is our value
    if ``row`` has KEY=VALUE, else "".
    """
    values = as_list(value)
    if key in LISTS and not switched:
        words = [part.strip() for part in value.split(",")] if isinstance(value, str) else values
        known = {"all-linear": "all-linear", **(row.values or {})}
        return known.get(words[0], words) if len(words) == 1 else words
    if row.values is not None:
        theirs = str(values[0]).lower() if len(values) == 1 else ""
        return None if theirs not in row.values else OFF if (ours := row.values[theirs]) is None else ours
    if switched:
        return OFF if str(value).lower() in ("false", "no", "none", "0") else switched
    if key in COMBINED and len(values) > 1:
        return values
    return values[0] if len(values) == 1 and not isinstance(values[0], dict) else None


def choose_stage(work: Translation, stage: str | None, file: str) -> None:
    """Set ``stage`` and, if the tool's stage is a loss of another stage here, ``stage.loss``.

    Raises:
        ConfigError: if the stage is missing, or does not exist here.
    """
    theirs = work.take("stage", "rl")
    if work.tool == "axolotl" and work.take("reward_model"):
        theirs = "rm"
    loss = work.left.get("pref_loss") or work.left.get("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if theirs == "dpo" and loss in ("orpo", "simpo"):
        theirs = work.take("pref_loss")
    if work.tool == "axolotl" and theirs is None:
        sources = [item for item in as_list(work.left.get("datasets")) if isinstance(item, dict)]
        theirs = "pt" if sources and all(item.get("type") == "completion" for item in sources) else "sft"
    if theirs == "ipo":
        theirs, work.words["stage.loss"] = "dpo", "ipo"
    chosen = stage or theirs
    if chosen is None:
        raise ConfigError(f"stage: {file} does not say it; give stage=sft, rm, dpo, kto, orpo or cpo.")
    if not Path(config_dir(), "stage", f"{chosen}.yaml").is_file():
        raise ConfigError(f"stage: {chosen} of {file} does not exist here; give another one, as stage=sft.")
    work.words["stage"] = chosen
    every, mixup = work.take("ref_model_sync_steps"), work.take("ref_model_mixup_alpha")
    if work.take("sync_ref_model"):
        work.words |= {"stage.sync_reference_every": every or 512, "stage.sync_reference_mixup": mixup or 0.6}
    else:
        idle = {*work.given} & {"ref_model_sync_steps", "ref_model_mixup_alpha"}
        work.needless |= dict.fromkeys(idle, "sync_ref_model is off")
    if work.tool == "trl" and chosen == "sft" and (kind := work.take("loss_type")) is not None:
        if kind == "nll":
            work.needless["loss_type"] = "it is the loss of stage=sft"
        else:
            work.lacks("loss_type", "stage=sft has the negative log-likelihood only")


def choose_model(work: Translation) -> None:
    name = "base_model" if work.tool == "axolotl" else "model_name_or_path"
    if (path := work.take(name)) is None:
        raise ConfigError(f"{name}: the configuration names no model; add it.")
    work.words |= {"model": "hf", "model.path": path}
    if work.tool == "trl" and work.words["stage"] == "sft":
        choose_targets(work)


def choose_targets(work: Translation) -> None:
    """Translate the two options that decide whether TRL's sft trains on prompts."""
    names = ("assistant_only_loss", "completion_only_loss")
    given = {name: value for name in names if (value := work.take(name)) is not None}
    if True in given.values():
        work.needless |= dict.fromkeys(given, "only the answers are trained by default")
    elif given.get("completion_only_loss") is False:
        work.words["data.train_on_prompt"] = True
    else:
        work.checks["data.train_on_prompt"] = (
            "TRL trains on every token of conversations (messages); give data.train_on_prompt=true for that"
        )


def choose_adapter(work: Translation) -> None:
    """Set ``adapter``, and drop the tool's default LoRA options unless a new adapter is trained.

    A run without an adapter, or one that continues a saved adapter, does not read them. Options that the file
    itself gives are kept. In LLaMA-Factory ``lora_alpha`` is by default twice the rank.
    """
    chosen = []
    for name in list(work.left):
        row = work.row(name)
        if row is not None and row.here.partition("=")[0] == "adapter":
            translate_option(work, name)
            chosen.append(str(work.words.pop("adapter", "none")))
    frozen = {"lora", "qlora"} & {*chosen}
    adapter = max(chosen, key=ADAPTERS.index) if frozen else "none"
    if {"qlora", "dora"} <= {*chosen}:
        work.missing["4 bits"] = "adapter=dora has no quantised weights; use adapter=qlora without dora"
    kept = adapter != "none" and not {"adapter_name_or_path", "lora_model_dir"} & {*work.given}
    if adapter != "none":
        work.words["adapter"] = adapter
    if not kept:
        work.left = {
            name: value for name, value in work.left.items() if "lora" not in name or name in work.given
        }
    elif work.tool == "llamafactory" and "lora_alpha" not in work.given:
        work.left["lora_alpha"] = 2 * int(as_number("lora_rank", work.left["lora_rank"]))
    elif work.tool == "trl" and "lora_target_modules" not in work.given:
        work.checks["adapter.target_modules"] = (
            "peft's default for Llama and Qwen; other models have other ones"
        )


def choose_batch(work: Translation, ranks: int | None) -> None:
    """Set the layout, ``run.micro_batch_size`` and ``run.global_batch_size``.

    Raises:
        ConfigError: if ``ranks`` is not divisible by the product of the sizes of the layout.
    """
    tp = int(work.number("tensor_parallel_size") or 1)
    cp = int(work.number("context_parallel_size", "sequence_parallel_degree") or 1)
    replicas = int(work.number("dp_replicate_size") or 1)
    shards = int(work.number("dp_shard_size") or 1)
    if ranks is None:
        ranks = tp * cp * replicas * shards
        work.checks["ranks"] = f"it is not given; for {ranks} rank(s). Give ranks=N for the batch of N GPUs"
    if ranks % (tp * cp * replicas):
        raise ConfigError(f"ranks: {ranks} is not divisible by {tp * cp * replicas}; correct it.")
    dp = ranks // (tp * cp)
    sharded = [work.left.pop(name, None) for name in ("deepspeed", "fsdp", "fsdp_config", "fsdp_version")]
    if any(sharded):
        work.checks["parallelism"] = (
            "fsdp2 is ZeRO-3; ZeRO-2 is parallelism.reshard_after_forward=false, and offloading "
            "parallelism.cpu_offload=true"
        )
    if ranks > 1 or any(sharded):
        work.words |= {"parallelism": "fsdp2", "parallelism.dp": dp}
        sizes = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.dp_replicate": replicas}
        work.words |= {key: size for key, size in sizes.items() if size > 1}
    micro = int(work.number("per_device_train_batch_size", "micro_batch_size", "train_batch_size") or 1)
    steps = int(work.number("gradient_accumulation_steps") or 1)
    total = work.number("batch_size")
    work.words["run.global_batch_size"] = (int(total) if total else micro * steps) * dp
    work.words["run.micro_batch_size"] = "auto" if work.take("auto_find_batch_size") else micro


def choose_schedule(work: Translation) -> None:
    """Set the length of the run, ``optimizer.betas`` and the keys of the scheduler."""
    steps, epochs = work.number("max_steps") or -1, work.number("num_train_epochs", "num_epochs") or 0.0
    key, length = ("run.max_steps", steps) if steps > 0 else ("run.epochs", epochs)
    work.words[key] = int(length) if length == int(length) else length
    beta = work.number("adam_beta1")
    work.words["optimizer.betas"] = [0.9 if beta is None else beta, work.number("adam_beta2")]
    if steps > 0:
        for name in ("num_train_epochs", "num_epochs"):
            work.skip(name, "max_steps takes precedence")
    if (work.left.get("lr_scheduler_type") or work.left.get("lr_scheduler")) == "constant":
        for name in ("warmup_steps", "warmup_ratio"):
            work.skip(name, "a constant rate has no warmup there")
    share, warmup = work.number("warmup_ratio"), work.number("warmup_steps")
    if warmup and warmup >= 1:
        work.skip("warmup_ratio", "warmup_steps takes precedence")
        work.words["scheduler.warmup_steps"] = int(warmup)
    elif (warmup or share) and warmup != 0:
        work.words["scheduler.warmup_ratio"] = warmup or share
    elif share and "warmup_ratio" in work.given:
        work.words["scheduler.warmup_ratio"] = share
    if work.tool == "axolotl" and not {"warmup_ratio", "warmup_steps"} & {*work.given}:
        work.checks["scheduler.warmup_ratio"] = "axolotl's default, which has 100 steps at most"
    rate = as_number("learning_rate", work.left.get("learning_rate") or 0)
    if (least := work.number("cosine_min_lr_ratio")) is not None:
        work.words["scheduler.min_lr"] = least * rate
    settings = work.left.get("lr_scheduler_kwargs")
    if isinstance(settings, dict) and {*settings} <= {"min_lr", "min_lr_rate", "num_decay_steps"}:
        del work.left["lr_scheduler_kwargs"]
        if "min_lr_rate" in settings:
            work.words["scheduler.min_lr"] = float(settings["min_lr_rate"]) * rate
        names = {"min_lr": "scheduler.min_lr", "num_decay_steps": "scheduler.decay_steps"}
        work.words |= {ours: settings[theirs] for theirs, ours in names.items() if theirs in settings}


def choose_cadences(work: Translation) -> None:
    """Set how often the run evaluates and saves; parts of an epoch become shares of the run."""
    given = work.given
    default = "no"
    if work.tool == "axolotl" and "eval_steps" in given:
        default = "steps"
    elif work.tool == "axolotl" and (given.get("val_set_size") or given.get("test_datasets")):
        default = "epoch"
    strategy = work.take("eval_strategy", "evaluation_strategy") or default
    every = work.number("eval_steps") or as_number("logging_steps", work.left.get("logging_steps", 0))
    cadence(work, "run.eval_every", strategy, every, work.number("evals_per_epoch"))
    saving = work.take("save_strategy")
    saving = "steps" if saving is None or ("save_steps" in given and "save_strategy" not in given) else saving
    every, parts = work.number("save_steps") or 0, work.number("saves_per_epoch")
    cadence(work, "checkpoint.save_every", saving, every, parts)
    for name, chosen in (("eval_steps", strategy), ("save_steps", saving)):
        if chosen != "steps":
            work.skip(name, f"it is read with the strategy steps, which is {chosen}")
    if (patience := work.take("early_stopping_patience", "early_stopping_steps")) is not None:
        work.words |= {"early_stopping.patience": patience, "early_stopping.metric": "eval/loss"}


def cadence(work: Translation, key: str, strategy: str, every: float, parts: float | None) -> None:
    """Set the cadence ``key``, if it is not off.

    It is one epoch, ``every`` steps (a share of the run if below 1), or a ``parts``-th of an epoch.
    ``strategy`` is the other tool's: ``epoch``, ``steps``, ``best`` or ``no``.
    """
    epochs = work.words.get("run.epochs")
    if strategy == "best":
        work.words["checkpoint.keep_best"] = "eval/loss"
    elif parts == 1 or (strategy == "epoch" and not parts):
        work.words[f"{key}_epochs"] = 1
    elif not parts:
        work.words |= {key: int(every) if every >= 1 else every} if strategy == "steps" and every else {}
    elif not isinstance(epochs, int | float):
        work.checks[key] = "the length of an epoch is not known; give the number of steps"
    elif (number := parts * epochs) > 1:
        work.words[key] = math.floor(1e6 / number) / 1e6  # not later than the end of an epoch


def dataset_info(work: Translation) -> None:
    """Translate LLaMA-Factory's options of data."""
    names, evaluated = work.take("dataset"), work.take("eval_dataset")
    work.words |= {"data": "llamafactory", "data.dataset_info": work.take("dataset_dir")}
    limit = work.given.get("max_samples")
    if limit and (evaluated or work.given.get("val_size")):  # there it also limits the data of evaluations
        work.words["data.max_eval_samples"] = limit
    if "data_seed" in work.given and work.given.get("seed") not in (None, work.given["data_seed"]):
        work.missing[f"seed={work.given['seed']}"] = "run.seed, which data_seed sets, is that of everything"
    for key, given in (("data.dataset", names), ("data.eval_dataset", evaluated)):
        every = [name.strip() for text in as_list(given) for name in str(text).split(",")]
        if every:
            work.words[key] = every[0] if len(every) == 1 else every
    if work.words["stage"] == "pt" and "packing" not in work.given:
        work.words["data.packing"] = "concat"
        work.take("packing")
    if work.take("neat_packing"):
        work.words["data.packing"] = "bfd"
        work.take("packing")
    held_out_share(work, "val_size")


def hub_dataset(work: Translation) -> None:
    """Translate TRL's ``dataset_name`` (a data set of the hub, or a path) and ``dataset_test_split``.

    Raises:
        ConfigError: if ``dataset_name`` is missing.
    """
    name = work.take("dataset_name")
    if not work.left.get("packing"):
        work.skip("packing_strategy", "packing is false")
    elif work.words["stage"] != "pt" and work.left.get("packing_strategy") == "wrapped":
        work.lacks("packing_strategy", "samples are packed as a whole")
        work.left |= {"packing_strategy": "bfd"}
    if "datasets" in work.given:
        work.skip("dataset_name", "it is not read with datasets")
        hub_datasets(work)
        return
    if name is None:
        raise ConfigError("dataset_name: the configuration names no data; add it, or the path of a file.")
    split = work.take("dataset_test_split") or "test"
    train = files_of_split(name, work.given.get("dataset_train_split", "train"))
    work.words |= {"data": "files", "data.train": train}
    if not train.startswith("hub:"):
        work.skip("dataset_train_split", "the files of data.train are those of the split")
        if work.take("dataset_config") is not None:
            work.lacks("dataset_config", "only a data set of the hub has subsets; name the files of this one")
    if work.given.get("eval_strategy", "no") != "no":
        evaluated = files_of_split(name, split)
        if train.startswith("hub:"):
            work.words["data.eval_split"] = split
        elif evaluated != train:
            work.words["data.eval"] = evaluated
        else:
            work.checks["data.eval"] = f"{name} has no file of {split}; name one, or give data.eval_fraction"
    else:
        work.skip("dataset_test_split", "eval_strategy is no")


def hub_datasets(work: Translation) -> None:
    """Translate TRL's mixture ``datasets``, all of whose samples are in every epoch."""
    sources = as_list(work.take("datasets"))
    if not all(isinstance(item, dict) and "path" in item for item in sources):
        raise ConfigError("datasets: must be a list of mappings with a path; correct it.")
    paths = [path for item in sources for path in files_of(item)]
    work.words |= {"data": "files", "data.sources": [{"path": path} for path in paths]}
    for key, theirs, default in (("split", "split", "train"), ("subset", "name", None)):
        found = [item.get(theirs) or default for item in sources]
        if any(other != found[0] for other in found):
            work.missing[f"datasets: {theirs}"] = f"data.{key} holds for all sources; convert the others"
        elif found[0] != default and all(path.startswith("hub:") for path in paths):
            work.words[f"data.{key}"] = found[0]
    for item in sources:
        for name in {*item} - {"path", "split", "name", "data_files", "columns"}:
            work.missing[f"datasets: {name}={item[name]}"] = "use the options of data, see docs/data.md"
    held_out_share(work, "test_split_size")
    work.skip("dataset_test_split", "datasets has no test split of its own")


def axolotl_datasets(work: Translation) -> None:
    """Translate axolotl's ``datasets`` and ``test_datasets``.

    Raises:
        ConfigError: if ``datasets`` is empty, or an entry is not a mapping with a path.
    """
    sources, tests = as_list(work.take("datasets")), as_list(work.take("test_datasets"))
    if not sources or not all(isinstance(item, dict) and "path" in item for item in [*sources, *tests]):
        raise ConfigError("datasets: must be a list of mappings with a path; correct it.")
    varied = [
        key for key in OF_A_SOURCE if any(ENTRIES[key](item) != ENTRIES[key](sources[0]) for item in sources)
    ]
    entries = [
        {"path": path} | {key: value for key in varied if (value := ENTRIES[key](item))}
        for item in sources
        for path in files_of(item)
    ]
    paths = [entry["path"] for entry in entries]
    work.words["data"] = "files"
    work.words |= {"data.train": paths[0]} if len(paths) == 1 else {"data.sources": entries}
    axolotl_tests(work, tests, sources[0])
    for key, found_in in ENTRIES.items():
        found = [found_in(item) for item in sources]
        if key in varied:
            continue
        if any(other != found[0] for other in found):
            work.missing[f"datasets: {key}"] = f"data.{key} holds for all sources; convert the others"
        if key in OF_HUB and not any(path.startswith("hub:") for path in paths):
            if found[0] not in (None, "train"):
                work.missing[f"datasets: {key}"] = "only a data set of the hub has one; name its files"
        elif found[0]:
            work.words[f"data.{key}"] = found[0]
    for item in sources:
        work.missing |= {f"datasets: {name}": why for name, why in lost(item).items()}
        if isinstance(item.get("type"), str) and format_of(item) is None:
            work.checks["data.format"] = f"type {item['type']} is not known; the format is recognised"
    if all(item.get("type") == "alpaca" for item in sources) and "chat_template" not in work.given:
        write_alpaca(
            work,
            "for a record with an input, axolotl has another first paragraph and a heading '### Input:'; "
            "here the input is below the instruction",
        )
    elif any(item.get("type") == "alpaca" for item in sources):
        work.checks["model.chat_template"] = (
            "axolotl writes '### Instruction:' before the turns of alpaca; here a chat template does"
        )
    held_out_share(work, "val_set_size")


def write_alpaca(work: Translation, difference: str) -> None:
    """Choose the prompts of Stanford Alpaca, which have one template and one system text."""
    work.words["model.chat_template"] = "plain"
    if work.words["stage"] != "pt":
        work.words.setdefault("data.default_system", ALPACA_SYSTEM)
    work.checks["model.chat_template"] = difference


def axolotl_tests(work: Translation, tests: list[Any], trained: Config) -> None:
    """Translate axolotl's ``test_datasets``, given an entry of the data that is trained on."""
    evaluated = [path for item in tests for path in files_of(item)]
    if len(evaluated) == 1:
        work.words["data.eval"] = evaluated[0]
    elif evaluated:
        work.words["data.eval"] = {f"test{number}": path for number, path in enumerate(evaluated)}
    splits = {item.get("split") for item in tests if any(path.startswith("hub:") for path in files_of(item))}
    if len(splits) == 1 and None not in splits:
        work.words["data.eval_split"] = splits.pop()
    elif len(splits) > 1:
        work.missing["test_datasets: split"] = "data.eval_split holds for all of data.eval"
    for key in (key for key in ENTRIES if key != "split"):
        if any(ENTRIES[key](item) != ENTRIES[key](trained) for item in tests):
            work.missing[f"test_datasets: {key}"] = f"data.{key} holds for all data; convert the files"


FIELDS = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
"""Our names of fields. The option ``field_NAME`` of an entry gives the name of the field in the records."""
READ = {"path", "data_files", "ds_type", "type", "split", "name", "revision", "field", "field_messages"}
READ |= {"message_field_role", "message_field_content", "message_field_training"}
READ |= {"message_property_mappings", "roles"}
READ |= {f"field_{key}" for key in FIELDS}
"""The keys of an entry of ``datasets`` that are read, or have no effect."""
USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": ([], ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
}
"""Other keys of an entry -> their values for which no option is needed here."""
UNREAD = {
    "roles_to_train": "the turns of the assistant are trained on",
    "train_on_eos": "the token that ends a turn of the assistant is trained on",
    "chat_template": "model.chat_template is that of all data",
}
"""Keys of ``USUAL`` -> the rule that applies here, which is reported for any other value."""


def lost(item: Config) -> dict[str, str]:
    """Return the keys of an entry of ``datasets`` without an equivalent, each with the reason or remedy."""
    found = {}
    detailed = item["type"] if isinstance(item.get("type"), dict) else {}
    for name, value in detailed.items():
        if name not in READ and value is not None:
            found[f"type.{name}={value}"] = "write it in the records, or in a chat template"
    for name, value in item.items():
        if name not in READ and value is not None and value not in USUAL.get(name, ()):
            found[f"{name}={value}"] = UNREAD.get(name, "use the options of data, see docs/data.md")
    for ours, theirs in (item.get("message_property_mappings") or {}).items():
        if ours not in ("role", "content") and theirs != ours:
            found[f"message_property_mappings.{ours}={theirs}"] = f"rename the key to {ours} in the records"
    return found


def files_of(item: Config) -> list[str]:
    """Return the sources of an entry of ``datasets``: its files, or a data set of the hub."""
    if item.get("data_files"):
        return [str(path) for path in as_list(item["data_files"])]
    return [str(item["path"]) if "ds_type" in item else place(item["path"])]


def format_of(item: Config) -> str | None:
    kind = str(item.get("type") or "")
    if kind.startswith("chat_template"):
        return "preference" if kind != "chat_template" else "messages"
    return FORMATS.get(kind)


def columns_of(item: Config) -> dict[str, object]:
    """Return ``data.columns`` for an entry of axolotl's ``datasets``: our name of a field -> the record's.

    Fields whose two names are equal are left out.
    """
    mapped = item.get("message_property_mappings") or {}
    detailed = item["type"] if isinstance(item.get("type"), dict) else item
    found = {
        "text": item.get("field"),
        "messages": item.get("field_messages"),
        "role": mapped.get("role", item.get("message_field_role")),
        "content": mapped.get("content", item.get("message_field_content")),
        "train": item.get("message_field_training"),
        **{key: detailed.get(f"field_{key}") for key in FIELDS},
    }
    return {ours: theirs for ours, theirs in found.items() if theirs not in (None, ours)}


def roles_of(item: Config) -> dict[str, str]:
    """Return ``data.roles`` (name of a role in the records -> role) from axolotl's list of names per role."""
    roles = item.get("roles") or {}
    return {theirs: ours for ours, names in roles.items() for theirs in as_list(names) if theirs != ours}


ENTRIES: Mapping[str, Callable[[Config], Any]] = {
    "format": format_of,
    "columns": columns_of,
    "roles": roles_of,
    "split": lambda item: item.get("split"),
    "subset": lambda item: item.get("name"),
    "revision": lambda item: item.get("revision"),
}
"""Key of the group ``data`` -> the function that returns its value for an entry of ``datasets``."""
OF_A_SOURCE = ("format", "columns")
"""Keys of ``ENTRIES`` that each of ``data.sources`` may have."""
OF_HUB = ("split", "subset", "revision")
"""Keys of ``ENTRIES`` that only data sets of the hub have."""


def held_out_share(work: Translation, name: str) -> None:
    share = work.number(name) or 0.0
    if share >= 1:
        work.lacks(name, "use data.eval_fraction, a share below 1")
    elif share:
        work.words["data.eval_fraction"] = share


def place(name: object) -> str:
    """Return ``name`` unchanged if it is a path, or as ``hub:NAME`` if it is a data set of the hub."""
    text = str(name)
    is_path = text.startswith((".", "/", "~")) or Path(text).suffix in FILES or Path(text).exists()
    return text if is_path else f"hub:{text}"


def files_of_split(name: object, split: str) -> str:
    """Return the pattern of the files of ``split`` in the folder ``name``, or ``place(name)`` without any."""
    folder = Path(str(name))
    if folder.is_dir() and any(path.suffix in FILES for path in folder.glob(f"{split}*")):
        return str(folder / f"{split}*")
    return place(name)


def as_list(value: object) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


EVALUATED = ("data.eval", "data.eval_dataset", "data.eval_fraction", "data.eval_split")
"""Keys, any one of which gives a run data to evaluate on."""
OF_ADAPTER = ("r", "alpha", "target_modules", "rslora", "modules_to_save", "dora", "init_lora_weights")
"""Keys of the group ``adapter`` whose values a saved adapter has."""


def leave_out_of_adapter(work: Translation) -> None:
    """Remove the overrides that a saved adapter (``adapter.path``) decides."""
    if "adapter.path" not in work.words:
        return
    for key in (f"adapter.{name}" for name in OF_ADAPTER):
        if work.words.pop(key, None) is not None:
            work.checks.pop(key, None)
            work.needless.update(dict.fromkeys(work.names_of(key), "the saved adapter has it"))


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
            work.needless.update(dict.fromkeys(work.names_of(key), f"{group}={option} does not read {key}"))
            del work.words[key]
