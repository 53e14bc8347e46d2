"""The command line: Hydra's entry point, its error messages and its exit codes.

The import of this module does not import torch, because help, ``--cfg job`` and completion must be fast.
"""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from components.contracts.errors import DONE, FAILED, INTERRUPTED, ConfigError
from components.contracts.json_types import Json
from components.home import expand_home
from components.json_text import leaves
from components.rank_info import RankInfo
from runner.command_mistakes import explained
from runner.conf_folder import config_dir, default_config
from runner.config.command_line import long_flags
from runner.config.sources import ConfigSources, name_of
from runner.config.unknown_keys import check_long_options
from runner.distribution import distribution
from runner.garbage_collection import collect_rarely
from runner.launch import slurm_env
from runner.launch.default_env import set_default_env
from runner.records.job_record import SWEEP_FOLDER, SweepJob
from runner.search_path import program_first
from runner.signals import die_with_parent, handling, interrupt
from runner.standard_streams import survive_closed_streams
from runner.sweeps.sweep import finish_sweep, run_point

HOME = re.compile(r"~[\w.-]*/")
READ_BY_SWEEPS = re.compile(r"\+*hydra[./](launcher|sweeper|sweep)\b")


def run_job(config: DictConfig) -> float:
    """Execute one run, or one job of a sweep; return its final loss.

    It is the evaluation loss, or else the training loss. NaN means that there is none, for example because a
    signal stopped the run.

    Raises:
        SystemExit: if a single run fails, with its exit code.
    """
    if in_sweep():
        return run_point(sweep_point(), lambda: execute(config), explained)
    losses: list[float] = []
    if code := exit_code(lambda: losses.append(execute(config))):
        raise SystemExit(code)
    return losses[0] if losses else math.nan  # a signal stopped the run


application = hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
job = application(run_job)


def execute(config: DictConfig, on_folder: Callable[[Path], object] = str) -> float:
    began, where = time.time(), provenance()
    plain = resolved(config, where)
    announce_loading()
    from runner.launch.run import run

    return run(plain, where, sys.argv, began, on_folder)


def announce_loading() -> None:
    """Print a line on a terminal before torch is imported, which takes seconds."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        print("loading torch ...", file=sys.stderr)


def in_sweep() -> bool:
    """Return whether Hydra's current job is one of a sweep, which a file can also start."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def sweep_point() -> SweepJob:
    """Return the place of Hydra's current job in its sweep."""
    state = HydraConfig.get()
    overrides, keys = as_given(state), swept_keys(state)
    swept = tuple(word for word in overrides if name_of(word) in keys)
    return SweepJob(Path(os.environ[SWEEP_FOLDER]), int(state.job.num), overrides, swept)


def swept_keys(state: DictConfig) -> set[str]:
    """Return the keys that the sweep of this command varies, by its command line or by ``hydra.sweeper``."""
    words = [word for word in long_flags(sys.argv[1:]) if not word.startswith("-")]
    typed = OverridesParser.create().parse_overrides(words)
    params = state.sweeper.get("params") or {}
    return {o.key_or_group for o in typed if o.is_sweep_override()} | {name_of(str(key)) for key in params}


def as_given(state: DictConfig) -> tuple[str, ...]:
    """Return the task overrides of a ``hydra`` node as they were typed, without resolving interpolations."""
    words = OmegaConf.to_container(state.overrides.task)
    assert isinstance(words, list)
    return tuple(map(str, words))


def command() -> int:
    """Execute the command of ``sys.argv``; return the exit code."""
    os.environ.pop(SWEEP_FOLDER, None)
    try:
        check_long_options(sys.argv[1:])
        sys.argv = [sys.argv[0], *map(as_override, sys.argv[1:])]
    except ConfigError as error:
        return explained(error)
    if sys.argv[1:] == ["--version"]:  # Hydra would print its own
        return exit_code(print_version)
    code = exit_code(job)
    return finish_sweep(Path(os.environ[SWEEP_FOLDER]), code) if SWEEP_FOLDER in os.environ else code


def as_override(word: str) -> str:
    """Return a word of the command line in Hydra's syntax.

    ``~/`` and ``~user/`` are expanded, which a shell does not do after "=". Parts of splits, such as
    ``train[:90%]``, are quoted.

    Raises:
        ConfigError: if there is no such user.
    """
    key, equals, value = word.partition("=")
    if key.endswith(("data.split", "data.eval_split")) and not re.match(r"\[|\w+\(", value):
        return key + equals + re.sub(r"(?:^|(?<=,)) *([^][,'\"() ]+\[[^,'\"]*)", r"'\1'", value)
    return re.sub(r"(?<=[=,:\[ ])~[\w.-]*(?=/)", lambda found: expand_home(key, found[0]), word)


def print_version() -> None:
    print(distribution().name, distribution().version)


def run_or_answer(task: Callable[[Sequence[str]], object], usage: str | None) -> int:
    """Call ``task`` with the arguments, or print the usage or the version; return the exit code.

    ``--help`` or ``-h`` prints ``usage``, ``--version`` the version.
    """
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        code = exit_code(lambda: print((usage or "").replace("``", "").strip()))
    else:
        code = exit_code(
            print_version if "--version" in arguments else lambda: unless_closed(task, arguments)
        )
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
    return code


def unless_closed(task: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> None:
    """Call ``task``, which ends if the reader of its output, such as ``head``, has read enough."""
    try:
        task(arguments)
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command and exit with one of the codes of ``components.contracts.errors``."""
    # Hydra would print a stack and exit with 1 for every mistake; this program needs the exception itself.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    set_default_env()
    collect_rarely()
    try:
        os.environ |= slurm_env.ranks(os.environ)
        place = RankInfo.read()
    except ConfigError as error:
        sys.exit(explained(error))
    # Every rank of torchrun leads a session, unless torchrun started a script that started the rank.
    if slurm_env.TORCHRUN in os.environ and os.getsid(0) == os.getpid():
        die_with_parent()
    program_first()
    survive_closed_streams()
    code = command()
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
            check_encoding(sys.argv)
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


def check_encoding(words: Sequence[str]) -> None:
    """Raise ConfigError if a word of the command line holds bytes that are not UTF-8."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise ConfigError(f"{shown}: is not UTF-8; correct it, or name another path.") from None


def provenance() -> ConfigSources:
    """Return the sources of the config of Hydra's current job.

    Raises:
        ConfigError: if a key of ``hydra`` that has no effect here, such as hydra.run.dir, is set.
    """
    state = HydraConfig.get()
    for key in ("run.dir", "job.chdir", "output_subdir", "sweep.subdir"):
        if OmegaConf.select(state, key) not in (".", False, None):
            raise ConfigError(f"hydra.{key}: nothing reads it; leave it out, and set run.output_dir.")
    if state.mode is RunMode.RUN and "hydra.mode=RUN" not in sys.argv:  # which turns a sweep into one run
        for word in filter(READ_BY_SWEEPS.match, sys.argv[1:]):
            raise ConfigError(f"{word}: is read only in a sweep; add -m, or leave it out.")
    folders = tuple(Path(s.path) for s in state.runtime.config_sources if s.schema == "file")
    choices = {group: option for group, option in state.runtime.choices.items() if option is not None}
    point = sweep_point() if in_sweep() else None
    return ConfigSources(choices, as_given(state), folders, point)


# ${unless:OTHER,VALUE,INSTEAD} is VALUE, a default, if OTHER is null, else INSTEAD (null if it is omitted).
OmegaConf.register_new_resolver(
    "unless", lambda other, value, instead=None: value if other is None else instead, replace=True
)


def resolved(config: DictConfig, where: ConfigSources) -> Json:
    """Return the config as dicts and lists, with interpolations resolved and ``~`` in paths expanded.

    Raises:
        ConfigError: if a mandatory value (``???``) is missing, or a path names the home of an unknown user.
    """
    decode_environment(config)
    evaluates = OmegaConf.select(config, "run.evaluate_only") is True
    if evaluates and "hook" in config and not where.typed("hook"):
        # An evaluation has no hooks, and those of an experiment may lack a value. ``check_evaluate_only``
        # refuses hooks of the command line.
        config.hook = {}
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return expand_homes("", plain)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise ConfigError(f"{key} ({where.of(key)}): needs a value; give {key}=VALUE.") from error


def decode_environment(config: DictConfig) -> None:
    """Parse every value of the form ``${oc.env:NAME}`` as YAML, unless the default of its key is a string."""
    raw = OmegaConf.to_container(config, resolve=False)
    found = [key for key, value in leaves(raw) if str(value).startswith("${oc.env:")]
    defaults = dict(leaves(default_config(as_given(HydraConfig.get())))) if found else {}
    for key in found:
        value = OmegaConf.select(config, key)  # None for ${oc.env:NAME,null}
        if value is not None and not isinstance(defaults.get(key), str):
            OmegaConf.update(config, key, parse_value(str(value)))


def parsed(override: str) -> Override | None:
    """Return an override as Hydra parses it. None means that Hydra cannot parse it."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def parse_value(text: str) -> object:
    """Parse text as YAML, and a single number such as ``1e-5``, which YAML reads as text, as a number."""
    value = yaml.safe_load(text)
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+", value)
    return float(text) if is_number else value


def expand_homes(key: str, node: object) -> object:
    """Replace a leading ``~/`` or ``~user/`` in every string of ``node`` by the path of the home folder.

    Only paths begin like that. ``key`` is the dotted key of ``node``, for messages.
    """
    if isinstance(node, dict):
        return {name: expand_homes(f"{key}.{name}".lstrip("."), value) for name, value in node.items()}
    if isinstance(node, list):
        return [expand_homes(key, value) for value in node]
    return expand_home(key, node) if isinstance(node, str) and HOME.match(node) else node
