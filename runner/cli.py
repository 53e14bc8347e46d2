"""The command line. Nothing here imports torch: help, ``--cfg job`` and completion must be fast."""

import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from components.contracts.errors import DONE, FAILED, INTERRUPTED, MISTAKE, ConfigError, TrainingError
from components.contracts.json_types import Json
from components.rank_info import RankInfo
from runner.config.command_line import is_sweep
from runner.config.renamed_keys import RENAMED
from runner.config.sources import ConfigSources, did_you_mean
from runner.distribution import distribution
from runner.launch import slurm_env
from runner.launch.signals import handling, interrupt
from runner.search_path import program_first
from runner.sweeps.job_record import SWEEP_FOLDER, SweepJob
from runner.sweeps.sweep import finish_sweep, run_point


def config_dir() -> str:
    """Return the path of conf/: inside the installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parent
    return str(next(path for path in (here / "conf", here.parent / "conf") if path.is_dir()))


def run_job(config: DictConfig) -> float:
    """Execute one run, or one job of a sweep; return its final loss (eval, else train)."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return run_point(sweep_point(), lambda: execute(config), explained)
    losses: list[float] = []
    if code := exit_code(lambda: losses.append(execute(config))):
        raise SystemExit(code)
    return losses[0] if losses else math.nan  # a signal stopped the run


job = hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")(run_job)


def execute(config: DictConfig) -> float:
    began, where = time.time(), provenance()
    plain = resolved(config, where)
    from runner.launch.run import run

    return run(plain, where, sys.argv, began)


def sweep_point() -> SweepJob:
    """Return the place of Hydra's current job in its sweep."""
    state = HydraConfig.get()
    return SweepJob(Path(os.environ[SWEEP_FOLDER]), int(state.job.num), as_given(state))


def as_given(state: DictConfig) -> tuple[str, ...]:
    """Return the task overrides of a ``hydra`` node as they were typed, without resolving interpolations."""
    words = OmegaConf.to_container(state.overrides.task)
    assert isinstance(words, list)
    return tuple(map(str, words))


def command() -> int:
    """Execute the command of ``sys.argv``; return the exit code."""
    os.environ.pop(SWEEP_FOLDER, None)
    if sys.argv[1:] == ["--version"]:  # Hydra would print its own
        return exit_code(lambda: print(distribution().name, distribution().version))
    if is_sweep(sys.argv) and RankInfo.read().launched:
        return explained(
            ConfigError(
                "-m: a sweep cannot run under torchrun or srun; leave it out (the runner starts its own "
                "ranks, or SLURM's: hydra/launcher=slurm)."
            )
        )
    code = exit_code(job)
    return finish_sweep(Path(os.environ[SWEEP_FOLDER]), code) if SWEEP_FOLDER in os.environ else code


def main() -> None:
    """Run the command and exit with one of the codes of ``components.contracts.errors``."""
    # Hydra would print a stack and exit with 1 for every mistake; this program needs the exception itself.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    os.environ |= slurm_env.ranks(os.environ)
    program_first()
    place, code = RankInfo.read(), command()
    if place.launched:
        # A rank of torchrun or srun: see runner.launch.rank_main.main.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(task: Callable[[], object]) -> int:
    """Run ``task``, print any failure for the user, and return the exit code.

    A signal ends the task at once, except while a run has state to save.
    """
    try:
        with handling(interrupt):
            task()
    except KeyboardInterrupt as request:
        if str(request) in slurm_env.NOTICES and slurm_env.queue_again(os.environ):
            return DONE
        print("interrupted; nothing is left running.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except Exception as error:  # noqa: BLE001  the whole error is printed
        return explained(error)
    return DONE


def explained(error: Exception) -> int:
    """Print one or two lines for a user's mistake, a traceback for any other error; return the exit code."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        error = ConfigError(f"{mark.name}:{mark.line + 1}: malformed YAML: {error.problem}; mend the file.")
    if type(error) is ValueError and "Config group override must be" in str(error):
        error = ConfigError(nothing_chosen())
    if isinstance(error, HydraException | OmegaConfBaseException):
        error = ConfigError(short_message(error))
    if not isinstance(error, ConfigError | TrainingError):
        traceback.print_exception(error)
        return FAILED
    print(f"error: {error}", file=sys.stderr)
    return MISTAKE if isinstance(error, ConfigError) else FAILED


def provenance() -> ConfigSources:
    """Return the provenance of the config of Hydra's current job."""
    state = HydraConfig.get()
    for key in ("run.dir", "job.chdir", "output_subdir"):
        if OmegaConf.select(state, key) not in (".", False, None):
            raise ConfigError(f"hydra.{key}: nothing reads it; leave it out, and set run.output_dir.")
    folders = tuple(Path(s.path) for s in state.runtime.config_sources if s.schema == "file")
    choices = {group: option for group, option in state.runtime.choices.items() if option is not None}
    point = sweep_point() if state.mode is RunMode.MULTIRUN else None
    return ConfigSources(choices, as_given(state), folders, point)


def default_unless_set(other: object, value: object, instead: object = None) -> object:
    """Resolve ``${default_unless_set:OTHER,VALUE,INSTEAD}``: VALUE, a default, or INSTEAD if OTHER is set."""
    return value if other is None else instead


OmegaConf.register_new_resolver("unless", default_unless_set, replace=True)


def resolved(config: DictConfig, where: ConfigSources) -> Json:
    """Return the config with every interpolation replaced. Raises ConfigError if a value is missing."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise ConfigError(f"{key} ({where.of(key)}): needs a value; give {key}=VALUE.") from error


def short_message(error: Exception) -> str:
    """Return Hydra's message in one or two lines, with the nearest match for a misspelt word."""
    text = str(error)
    if option := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text):
        group, word = option.groups()
        return f"{group}={word}: there is no such option; {did_you_mean(word, group_options(group))}"
    if key := re.search(r"Could not override '(logger)\.(\w+)\.", text):
        group, name = key.groups()
        if name in group_options(group) and not any(
            leaf.startswith(f"{group}.{name}.") for leaf in known_keys()
        ):
            return f"{group}.{name} (the command line): is not chosen; choose it: {group}=[jsonl,{name}]."
    if key := re.search(r"(?:Could not override|Key) '([^']+)'", text):
        if key[1] in RENAMED:
            return f"{key[1]} (the command line): is {RENAMED[key[1]]} now; use that name."
        return f"{key[1]} (the command line): nothing reads this key; {did_you_mean(key[1], known_keys())}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OverrideParseException):
        return f"{error.override} (the command line): is no KEY=VALUE: {lines[0]}; mend it, or quote it."
    return " ".join(lines[:2])


def nothing_chosen() -> str:
    """Return the message for ``group=null``, which Hydra refuses with a bare ValueError."""
    groups = [word.partition("=")[0] for word in sys.argv[1:] if word.lower().endswith("=null")]
    group = next(filter(group_options, groups), "a group")
    return f"{group} (the command line): null is no option; {did_you_mean('null', group_options(group))}"


def config_dirs() -> list[Path]:
    """Return conf/ and, if given, the folder of ``--config-dir``."""
    line = " ".join(sys.argv[1:])
    own = re.search(r"(?:--config-dir|-cd)[= ](\S+)", line)
    return [Path(config_dir()), *([Path(own[1])] if own else [])]


def group_options(group: str) -> list[str]:
    return [path.stem for folder in config_dirs() for path in (folder / group).glob("*.yaml")]


def known_keys() -> list[str]:
    """Return the dotted keys of the composition with the command line's groups, and all groups."""
    groups = [path.name for path in Path(config_dir()).iterdir() if path.is_dir()]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [*filter(is_choice, sys.argv[1:])]), resolve=False)
    return [*leaf_keys("", config), *groups]


def is_choice(argument: str) -> bool:
    """Return whether ``argument`` is ``group=option`` or ``group=[option,...]`` with options from conf/."""
    group, _, options = argument.partition("=")
    files = [Path(config_dir()) / group / f"{option}.yaml" for option in options.strip("[]").split(",")]
    return all(path.is_file() for path in files)


def leaf_keys(prefix: str, node: object) -> list[str]:
    if not isinstance(node, dict):
        return [prefix.rstrip(".")]
    return [leaf for key, value in node.items() for leaf in leaf_keys(f"{prefix}{key}.", value)]
