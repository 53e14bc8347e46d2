"""``python -m runner.evaluate checkpoint=DIR [KEY=VALUE ...]``: the metrics of a model, without training.

checkpoint=DIR  a run folder, whose newest complete checkpoint is used, a checkpoint folder, or a folder that
                transformers or peft reads, such as an export or an adapter
trust=[MODULE]  modules whose classes the options of the run may name, besides those of this program
KEY=VALUE       any option of ``python -m runner``: data.eval=FILE, parallelism=tp2pp2, run.name=NAME

A checkpoint is evaluated by the experiment of its run, changed by the options: on the same layout, the result
is the run's own to the last bit. The loss, its perplexity if it is a mean over tokens, and the metrics of the
stage are printed and written to run.json and the metrics of a new run folder.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from components.contracts.errors import MISTAKE, ConfigError
from components.home import expand_home
from runner import cli, conf_folder
from runner.commands.arguments import UNREAD_TRUST, first_line, is_path, trusted_modules
from runner.config.command_line import hydra_value, long_flags
from runner.config.sources import is_trusted, name_of
from runner.records.renamed_keys import with_current_key
from runner.records.run_dir import MODEL_PATHS, read_run_config
from runner.records.run_record import RunRecord
from runner.standard_streams import print_error

_LEFT_OUT = ("checkpoint", "early_stopping", "profiler", "preflight", "hydra", "hook")
"""Groups of the run's overrides that an evaluation leaves out."""
_DATA = ("data", "experiment", "data.train", "data.eval", "data.sources")
"""Keys, any one of which says on which data to evaluate."""
_DATASETS = ("data.dataset_info", "data.dataset", "data.eval_dataset", "data.shares")
"""Keys of data sets, which only the option ``data=llamafactory`` has."""
_CLASS = re.compile(r"_target_[\"']?\s*[=:]\s*[\"']?([\w.]+)(?=[\"']?\s*(?:[,}]|\Z))")
"""Pattern of the whole name of a class; a name with an interpolation does not match."""
_LOGGER = re.compile(r"logger\.\w+")
"""Pattern of the key of a logger, whose value may be a mapping with a ``_target_``."""
_OUTSIDE = re.compile(r"\.\.|\$|(?:^|[^\w.-])/")
"""Pattern that matches an option of a group if it may be a file outside of Hydra's search path."""
_SOURCES = (
    *("train", "sources", "shares", "stopping_strategy", "eval", "eval_fraction"),
    *("split", "eval_split", "subset", "revision"),
)
"""Keys of ``data`` that say which records are read; another choice of ``data`` brings its own."""
_DEMO = "components.data.StdlibData"
"""Class of the embedded text, which ``data.eval`` replaces."""
ADAPTER_CONFIG = "adapter_config.json"
_ONLY = ("run.evaluate_only=true", "run.export=false", "run.final_sample_tokens=0")
"""Overrides of every evaluation."""
_TRAINING = (
    *("run.eval_every", "run.eval_every_epochs", "run.eval_on_start", "run.max_time", "run.export"),
    *("run.max_restarts", "run.trial_step", "run.target_loss"),
    *("run.loss_spike_factor", "run.max_consecutive_skips"),
)


def evaluation(arguments: Sequence[str]) -> list[str]:
    """Return the overrides with which ``python -m runner`` evaluates the model.

    An example: of a run with ``stage=rm optimizer.lr=1e-5 run.max_time=1h data.train=a.jsonl run.name=x``,
    and with the arguments ``checkpoint=RUN data.eval=b.jsonl``, the result is ``stage=rm optimizer.lr=1e-5
    data.train=b.jsonl data.eval=b.jsonl run.name=evaluate_x checkpoint.resume=RUN
    checkpoint.allow_mismatch=true data=files data.sources=null data.eval_fraction=0`` and ``_ONLY``.

    Raises:
        ConfigError: if not exactly one checkpoint is given, it is of a kind that cannot be evaluated, or its
            run names code that is not trusted; or if modules are trusted for a folder that names none.
    """
    given = [word for word in long_flags(arguments) if not word.startswith(("checkpoint=", "trust="))]
    named = [word.partition("=")[2] for word in arguments if word.startswith("checkpoint=")]
    if len(named) != 1:
        have = "is given twice" if named else "is missing"
        if not named and (bare := next(filter(is_path, given), None)):
            have = f"is missing, and {bare} is not KEY=VALUE: use checkpoint={bare}"
        raise ConfigError(f"checkpoint: {have}; give one. Usage: {first_line(__doc__)}")
    folder = Path(expand_home("checkpoint", named[0])).absolute()
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter or (folder / "config.json").is_file():
        if any(word.startswith("trust=") for word in arguments):
            raise ConfigError(UNREAD_TRUST)
        model = ["model=hf", f"model.path={hydra_value(folder)}"]
        known = [*(on_its_base(folder, given) if is_adapter else model), named_after(folder)]
        check_data(folder, given)
    else:
        known = recorded(folder)
        check_code(known, arguments)
    # The options of another stage do not apply. An experiment may select a stage by itself.
    if stage_of([*known, *given]) != stage_of(known) and "experiment" not in map(name_of, known):
        known = [word for word in known if not name_of(word).startswith("stage.")]
    if "parallelism" in map(name_of, given):  # another layout, whose sizes are its own
        known = [word for word in known if not name_of(word).startswith("parallelism.")]
    if {"data.eval", "data"} & {*map(name_of, given)} == {"data.eval"} and "data=llamafactory" in known:
        known = [word for word in known if word != "data=llamafactory" and name_of(word) not in _DATASETS]
    known = without_replaced(known, given)
    words = [*known, *_ONLY, *evaluated_data(known, given), *given]
    options = [word for word in words if word.startswith("-")]  # Hydra refuses them between overrides
    keys = {name_of(word): word for word in words if word not in options}  # of each key the last one
    return [*options, *keys.values()]


def without_replaced(known: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return ``known`` without the keys of options of ``data`` and ``logger`` that ``given`` replaces."""
    chosen = {name_of(word): word.partition("=")[2] for word in given}
    option, loggers = chosen.get("data"), chosen.get("logger")
    is_ours = Path(conf_folder.config_dir(), "data", f"{option}.yaml").is_file()
    keys = conf_folder.keys_of("data", str(option)) - {*_SOURCES} if is_ours else set()

    def is_kept(word: str) -> bool:
        group, *rest = name_of(word).split(".")
        if group == "data" and rest and option is not None:
            return rest[0] in keys
        if group == "logger" and rest and loggers is not None:
            return rest[0] in loggers.strip("[]").split(",")
        return True

    return [word for word in known if is_kept(word)]


def named_after(folder: Path) -> str:
    """Return the override for the name of the evaluation of a folder, which may be the export of a run."""
    folder = folder.resolve()
    name = folder.parent.parent.name if (folder.parent / "run.json").is_file() else folder.name
    return f"run.name={hydra_value(f'evaluate_{name}')}"


def check_data(folder: Path, given: Sequence[str]) -> None:
    """Raise ConfigError if nothing says on which data the model in ``folder`` is evaluated."""
    if not {*_DATA, *_DATASETS} & {*map(name_of, given)}:
        raise ConfigError(
            f"data.eval: {folder} does not record on which data it is evaluated; give data.eval=FILE, or "
            "data=demo for the embedded text."
        )


def on_its_base(adapter: Path, given: Sequence[str]) -> list[str]:
    """Return the overrides that load an adapter on its base model, which ``given`` may name.

    Raises:
        ConfigError: if neither the adapter nor ``given`` names a base model.
    """
    cli.announce_loading()
    from components.adapters.peft_folder import adapter_overrides  # imports torch

    own = [f"{key}={hydra_value(value)}" for key, value in adapter_overrides(adapter).items()]
    if "model.path" not in map(name_of, [*own, *given]):
        raise ConfigError(
            f"checkpoint: {adapter}/{ADAPTER_CONFIG} names no base model (base_model_name_or_path); add "
            "model.path=DIR."
        )
    # An adapter may be trained with another chat template, or with tokens of its own.
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    return ["model=hf", *own, *([f"model.tokenizer={hydra_value(adapter)}"] if has_tokenizer else [])]


def recorded(folder: Path) -> list[str]:
    """Return the overrides of the run that a checkpoint is from, and those that load the checkpoint.

    Raises:
        ConfigError: if ``folder`` is neither a run folder nor in the checkpoints of one.
    """
    run = next((place for place in (folder, folder.parent.parent) if (place / "run.json").is_file()), None)
    if run is None:
        raise ConfigError(
            f"checkpoint: {folder} is not a run, a checkpoint in one or a Hugging Face folder; name another."
        )
    record = RunRecord.read(run)
    # Options of Hydra, such as --config-dir, would read files that the user has not named.
    given = [with_current_key(word) for word in record.overrides if not word.startswith("-")]
    words = [
        *(
            word
            for word in given
            if name_of(word).split(".")[0] not in _LEFT_OUT and name_of(word) not in _TRAINING
        ),
        *(["hydra.mode=RUN"] if "sweep" in map(name_of, given) else []),
        named_after(run / "export"),  # not among the trained runs
        f"checkpoint.resume={hydra_value(folder)}",
        "checkpoint.allow_mismatch=true",
    ]
    if (run / "config.yaml").is_file():
        config = read_run_config(run)
        is_demo = (config.get("data") or {}).get("_target_") == _DEMO
        if is_demo and "data" not in map(name_of, words):  # an experiment may select data, and did not
            words.append("data=demo")
        named = {*map(name_of, words)}
        for name in MODEL_PATHS:
            group, key = name.split(".")
            path = (config.get(group) or {}).get(key)
            # The run may have begun in another directory; or it was moved, together with the model.
            if ({name, "experiment"} & named) and path is not None and os.path.exists(path):
                words.append(f"{name}={hydra_value(path)}")
        # An override or an experiment may name a run, whose newest checkpoint is another one now.
        initial = config["checkpoint"].get("init_from")
        if initial is not None:  # it may have been removed since
            found = initial if Path(initial).is_dir() else None
            words.append(f"checkpoint.init_from={hydra_value(found)}")
    return words


def stage_of(overrides: Sequence[str]) -> str:
    """Return the option of the group ``stage``, by default that of ``conf/config.yaml``."""
    chosen = [word.partition("=")[2] for word in overrides if name_of(word) == "stage"]
    return chosen[-1] if chosen else "sft"


def check_code(recorded: Sequence[str], given: Sequence[str]) -> None:
    """Raise ConfigError if the options of a run name code or a file that the user has not trusted."""
    trusted = [module for word in given if word.startswith("trust=") for module in trusted_modules(word[6:])]
    replaced = {*map(name_of, given)}
    for word in recorded:
        if name_of(word) in replaced:
            continue
        classes = _CLASS.findall(word)
        if len(classes) < word.count("_target_") or not all(is_trusted(name, trusted) for name in classes):
            raise ConfigError(
                f"{name_of(word)} (run.json): {word} may name a class that is not of this program, and a "
                "folder may not; if you know the code, give trust=[MODULE], or this option in the command."
            )
        option = word.partition("=")[2]  # of a group, or a mapping of values
        names_file = "." not in name_of(word).partition("@")[0] and not option.startswith("{")
        override = cli.parsed(word)
        hides_class = (
            (names_file and _OUTSIDE.search(option))
            or ("$" in option and _LOGGER.fullmatch(name_of(word)))
            or (override is not None and override.is_sweep_override())  # which no run records
        )
        if hides_class:
            raise ConfigError(
                f"{name_of(word)} (run.json): {word} may be a file outside of conf/ or another value that "
                "may name any class; if you know it, give this option in the command."
            )
        allows = "trust_remote_code" in word and not word.lower().endswith("=false")
        if allows and "model.trust_remote_code" not in replaced:
            raise ConfigError(
                f"{name_of(word)} (run.json): the run allowed code that its model may bring; read it "
                "if there is some, then give model.trust_remote_code=true."
            )


OF_TRAINING = (
    ("data.stopping_strategy", "first_exhausted", False),
    ("data.drop_last", "false", False),
    ("data.split", "null", True),
    ("data.eval_split", "null", True),
    ("data.subset", "null", True),
    ("data.revision", "null", True),
)
"""Options of a run's training data that the evaluation of a file does not read: each with its default, and
whether only data sets of the hub have it."""


def evaluated_data(known: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return overrides that replace the training data by the given evaluation data, else [].

    The data of the run is then not read. ``known`` are the overrides of the run. ``data=files`` is added
    unless the run or ``given`` chooses an experiment, or data other than ``demo`` and ``stdlib``.
    """
    values = {name_of(word): word.partition("=")[2] for word in given}
    if "data.eval_dataset" in values:
        shares = ("data.shares=null", "data.stopping_strategy=first_exhausted")
        return [f"data.dataset={values['data.eval_dataset']}", "data.eval_fraction=0", *shares]
    if "data.eval" in values:
        override = cli.parsed(f"data.eval={values['data.eval']}")
        sets = None if override is None else override.value()  # a path, or several by name
        if override is None or sets is None:  # Hydra names what is wrong
            return []
        path = hydra_value(next(iter(sets.values()), None) if isinstance(sets, dict) else sets)
        if override.is_sweep_override():  # each job reads its own file
            if "{" in values["data.eval"]:
                raise ConfigError("data.eval: a sweep varies one set per job; give paths without names.")
            path = "${data.eval}"
        words = [*known, *given]
        chosen = next((word for word in reversed(words) if name_of(word) == "data"), None)
        if chosen is None and "experiment" in map(name_of, words):
            chosen = "data=another"  # an experiment may select the data itself
        of_files = ["data=files"] if chosen in (None, "data=demo", "data=stdlib") else []
        local = "hub:" not in values["data.eval"]
        unread = {name: value for name, value, of_hub in OF_TRAINING if local or not of_hub}
        set_before = {name_of(word) for word in known} - values.keys()
        rest = [f"{name}={value}" for name, value in unread.items() if name in set_before]
        return [
            *of_files,
            f"data.train={path}",
            "data.sources=null",
            "data.eval_fraction=0",
            *rest,
        ]
    return []


def main() -> None:
    arguments = sys.argv[1:]
    if not {"--help", "-h", "--version"} & set(arguments):
        try:
            sys.argv = [sys.argv[0], *evaluation(arguments)]
        except ConfigError as error:
            print_error(error)
            sys.exit(MISTAKE)
        cli.main()
    sys.exit(cli.run_or_answer(lambda _: None, __doc__))
