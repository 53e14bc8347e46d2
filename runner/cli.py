"""The command line: Hydra's entry point, its error messages and its exit codes.

The import of this module does not import torch, because help, ``--cfg job`` and completion must be fast.
"""

import errno
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from components.contracts.errors import DONE, FAILED, INTERRUPTED, MISTAKE, ConfigError, TrainingError
from components.contracts.json_types import Json
from components.home import expand_home
from components.json_text import leaves, one_line
from components.rank_info import RankInfo
from runner.config.command_line import long_flags
from runner.config.sources import COMMAND_LINE, ConfigSources, did_you_mean, name_of
from runner.config.unknown_keys import check_long_options, hint_for_value, translations, unknown_key
from runner.distribution import distribution
from runner.garbage_collection import collect_rarely
from runner.launch import slurm_env
from runner.launch.default_env import set_default_env
from runner.records.job_record import SWEEP_FOLDER, SweepJob
from runner.search_path import program_first
from runner.signals import die_with_parent, handling, interrupt
from runner.standard_streams import print_error, survive_closed_streams
from runner.sweeps.sweep import finish_sweep, run_point

PATHS = {"model": "model=hf model.path", "data": "data=files data.train"}
"""Group -> the overrides, without ``=PATH``, that are right if a user gives a path as its option."""
COMPOSITION = "hydra/_internal/config_loader_impl.py"
EXECUTION = str(Path(__file__).parent / "launch" / "run.py")
"""The end of the path of Hydra's file that composes configurations, and the path of the file that executes a
run. Tracebacks are searched for both."""
WRONG = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR)
"""Error numbers for a path that is too long, or that names a folder instead of a file or the reverse."""
COMMANDS = ("evaluate", "generate", "chat", "export", "report", "import_config")
"""Modules of ``runner`` that are commands, which a user may take for words of this one."""
HOME = re.compile(r"~[\w.-]*/")
READ_BY_SWEEPS = re.compile(r"\+*hydra[./](launcher|sweeper|sweep)\b")


def config_dir() -> str:
    """Return the path of conf/: inside the installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parent
    return str(next(path for path in (here / "conf", here.parent / "conf") if path.is_dir()))


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


def explained(error: Exception) -> int:
    """Print the message of a ConfigError or TrainingError, or else a traceback; return the exit code."""
    error = as_mistake(error)
    if not isinstance(error, ConfigError | TrainingError):
        traceback.print_exception(error)
        return FAILED
    print_error(error)
    return MISTAKE if isinstance(error, ConfigError) else FAILED


def as_mistake(error: Exception) -> Exception:
    """Return a ConfigError if a mistake of the user caused ``error``, else ``error`` itself."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        error = ConfigError(f"{mark.name}:{mark.line + 1}: malformed YAML: {error.problem}; correct it.")
    if type(error) is ValueError and "Config group override must be" in str(error):
        error = ConfigError(no_name_of_an_option())
    if isinstance(error, HydraException | OmegaConfBaseException):
        error = ConfigError(short_message(error))
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, ConfigError) and any(file.endswith(COMPOSITION) for file in files):
        reason = f"{type(error).__name__}: {one_line(error)}"
        error = ConfigError(
            f"{config_dirs()[-1]}: a file there, or an override, cannot be composed ({reason}); correct it."
        )
    if isinstance(error, OSError) and error.filename and (error.errno in WRONG or EXECUTION not in files):
        path = str(error.filename)[:200]
        error = ConfigError(f"{path}: {error.strerror}; name another path, or move what is there.")
    return error


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


def short_message(error: Exception) -> str:
    """Return Hydra's message in one or two lines, with the nearest match for a misspelt word."""
    text = str(error)
    if option := re.search(r"Could not (?:find|load) '((?:hydra/)?[^'/]+)/([^']+)'", text):
        return unknown_option(*option.groups())
    if key := re.search(r"Could not override '(logger|hook)\.(\w+)\.", text):
        group, name = key.groups()
        if name in group_options(group) and not any(
            leaf.startswith(f"{group}.{name}.") for leaf in known_keys()
        ):
            first = "jsonl," if group == "logger" else ""
            return f"{group}.{name} (the command line): is not chosen; choose it: {group}=[{first}{name}]."
    if key := re.search(r"(?:Could not override|Key) '([^']+)'", text):
        return unread_key(key[1])
    if several := re.search(r"Ambiguous value for argument '([^=']+)=([^']*)'", text):
        return several_values(*several.groups())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OverrideParseException):
        return no_override(str(error.override), lines[0])
    return " ".join(lines[:2]) or f"{config_dirs()[-1]}: {type(error).__name__} in a file there; correct it."


def no_override(word: str, reason: str) -> str:
    """Return the message for a word of the command line that Hydra cannot parse."""
    if word in COMMANDS:
        return f"{word}: is a command of its own; use python -m runner.{word}."
    files = [each for each in sys.argv[1:] if Path(each).suffix in (".yaml", ".yml", ".json")]
    file = next((each for each in files if "=" not in each), None)
    if file is not None and "=" not in word:
        return f"{file}: is not an option; use python -m runner.import_config TOOL {file} for a file."
    if word in group_options("stage"):
        return f"{word} (the command line): is not KEY=VALUE; use stage={word}."
    return f"{word} (the command line): is not KEY=VALUE: {reason}; correct it, or quote it."


def several_values(key: str, values: str) -> str:
    """Return the message for values with commas on a command line that starts no sweep."""
    name, options = key.lstrip("+"), group_options(key)
    if name not in known_keys() and not options:
        return unread_key(name)
    another = f", or {name}=[{values}] if it takes a list"
    if name == "data.eval":
        another = ", or data.eval='{a: FILE, b: FILE}' for several sets"
    elif options:
        another = f", or {name}=[{values}]" if name in ("logger", "hook") else ""
    return f"{key}={values} (the command line): has several values; use -m for a sweep of them{another}."


def unread_key(key: str) -> str:
    """Return the message for a key of the command line that the composed config lacks."""
    group = key.partition(".")[0]
    own = (f"{group}._target_=", "optimizer=torch") if group == "optimizer" else (f"{group}._target_=",)
    chosen = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{group}=")]
    options = [option for words in chosen for option in words.strip("[]").split(",")]
    files = [folder / group / f"{option}.yaml" for folder in config_dirs()[1:] for option in options]
    if any(word.startswith(own) for word in sys.argv[1:]) or any(file.is_file() for file in files):
        return f"{key} (the command line): is not in the file of {group}; to add it, use +{key}=VALUE."
    if others := options_with(key):
        return (
            f"{key} (the command line): nothing reads this key in this run, but {' or '.join(others)} does; "
            "choose it, or leave the key out."
        )
    known = known_keys()
    given = {name: value for name, _, value in (word.partition("=") for word in sys.argv[1:])}
    more = translations({name: given[name] for name in given if name != key and name not in known})
    return f"{unknown_key(key, COMMAND_LINE, known, given.get(key, ''))}{more}"


def unknown_option(group: str, word: str) -> str:
    path = group in PATHS and ("/" in word or "." in word)
    if path:
        hint = f"use {PATHS[group]}={word}."
    else:
        hint = hint_for_value(group, word) or did_you_mean(word, group_options(group))
        if group == "data" and hint.startswith("known: "):
            hint += f" For a data set of a dataset_info.json, use data=llamafactory data.dataset={word}."
    return f"{group}={word}: there is no such option; {hint}"


def no_name_of_an_option() -> str:
    """Return the message for ``group=null`` or ``group=5``, for which Hydra raises only a ValueError."""
    for word in sys.argv[1:]:
        group, _, value = word.partition("=")
        if (options := group_options(group)) and not isinstance(yaml.safe_load(value), str | list):
            hint = did_you_mean(value, options)
            return f"{group} (the command line): {value} is not an option; {hint}"
    return "the command line: a group has no option; name one, as in optimizer=adamw."


def config_dirs() -> list[Path]:
    """Return conf/ and, if given, the folder of ``--config-dir``."""
    own = [word.partition("=")[2] for word in long_flags(sys.argv) if word.startswith("--config-dir=")]
    return [Path(config_dir()), *map(Path, own)]


def group_options(group: str) -> list[str]:
    return [path.stem for folder in config_dirs() for path in (folder / group).glob("*.yaml")]


def keys_of(group: str, option: str) -> set[str]:
    """Return the keys of a group's option, including those of the options that it extends."""
    node = yaml.safe_load(Path(config_dir(), group, f"{option}.yaml").read_text()) or {}
    bases = [name for name in node.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    return {*node}.union(*(keys_of(group, name) for name in bases))


def options_with(key: str) -> list[str]:
    """Return GROUP=OPTION for up to three options of the group of ``key`` that have this key.

    The result is empty if the chosen option has the key, or if the group is ``logger`` or ``hook``.
    """
    group, *rest = key.split(".")
    if not rest or group in ("logger", "hook"):  # whose options are in nodes of their own
        return []
    here = f"{group}.{rest[0]}"
    if any(f"{known}.".startswith(f"{here}.") for known in known_keys()):
        return []
    options = sorted(path.stem for path in Path(config_dir(), group).glob("*.yaml"))
    return [f"{group}={option}" for option in options if rest[0] in keys_of(group, option)][:3]


def known_keys() -> list[str]:
    """Return the dotted keys of ``default_config``, and all groups."""
    groups = [path.name for path in Path(config_dir()).iterdir() if path.is_dir()]
    return [*(key for key, _ in leaves(default_config(sys.argv[1:]))), *groups]


def default_config(words: Sequence[str]) -> object:
    """Compose the config with only the group choices among ``words``; leave interpolations unresolved.

    If a sweep varies a group, its first option is chosen.
    """
    found = (word.partition("=") for word in words if is_choice(word))
    choices = [
        f"{group}={options if options.startswith('[') else options.partition(',')[0]}"
        for group, _, options in found
    ]
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else initialize_config_dir(config_dir(), version_base="1.3"):
        return OmegaConf.to_container(compose("config", choices), resolve=False)


def is_choice(argument: str) -> bool:
    """Return whether ``argument`` is ``group=option`` or ``group=[option,...]`` with options from conf/."""
    group, _, options = argument.partition("=")
    files = [Path(config_dir()) / group / f"{option}.yaml" for option in options.strip("[]").split(",")]
    return all(path.is_file() for path in files)
