"""The messages for mistakes on the command line and in config files."""

import errno
import re
import sys
import traceback
from pathlib import Path

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from components.contracts.errors import FAILED, MISTAKE, ConfigError, TrainingError
from components.json_text import one_line
from runner.conf_folder import config_dirs, group_options, known_keys, options_with
from runner.config.sources import COMMAND_LINE, did_you_mean
from runner.config.unknown_keys import hint_for_value, translations, unknown_key
from runner.standard_streams import print_error

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
