"""``python -m runner.import_config TOOL FILE [ranks=N] [stage=STAGE]``: another tool's run as a command.

TOOL         llamafactory, axolotl or trl
FILE         its YAML or JSON, or, for trl, a text with its command line: ``accelerate launch sft.py --a 1``;
             if the script has --config, the options in that file are read too
ranks=N      number of GPUs that the configuration was written for; default: that of its launcher, else 1
stage=STAGE  default: the stage that FILE or the name of the script implies

Prints the command of this program, with the tool's default values, and, as comments, each option of FILE that
has no equivalent or is not needed.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.home import expand_home
from runner.cli import run_or_answer
from runner.commands.arguments import Keys, first_line, parse_pairs, whole_number
from runner.commands.importing.sharding import FILES
from runner.commands.importing.translate import TOOLS, translate
from runner.commands.importing.translation import Translation
from runner.config.command_line import hydra_value

KEYS: Keys = {"ranks": None, "stage": ("pt", "sft", "rm", "dpo", "kto", "orpo", "cpo", "simpo")}
PER_NODE = {"nproc_per_node": "nnodes", "num_gpus": "num_nodes"}
"""Options of torchrun and deepspeed with the number of ranks of a node -> those with the number of nodes."""
ACCELERATE = ("num_processes", "config_file", "accelerate_config")
"""Options of accelerate, with the number of all ranks and its own file, which are those of TRL, too."""
NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?")
"""Words of a command line that are numbers. YAML reads others as numbers, too: 2024_01_15, 0123 and 1:30."""
TEXTS = (
    *("run.name", "run.output_dir", "model.path", "model.revision", "model.tokenizer", "model.add_tokens"),
    *("adapter.path", "stage.reference_path", "data.dataset", "data.eval_dataset", "data.dataset_info"),
    *("data.subset", "data.split", "data.eval_split", "data.revision"),
    *("data.default_system", "data.cache_dir"),
    *("logger.wandb.project", "logger.wandb.entity", "logger.wandb.name"),
)
"""Keys of texts, which another tool may give as 2024 or 1e10, and which a run refuses as numbers."""
SOURCE_TEXTS = ("path", "subset", "split", "revision")
"""Those of the keys of each entry of ``data.sources``."""
SCRIPT = re.compile(r"(?:^|[/_])(sft|dpo|kto|orpo|cpo|reward)(?:_\w+)?(?:\.py)?$")


def import_config(arguments: Sequence[str]) -> None:
    usage = f"Usage: {first_line(__doc__)}"
    if len(arguments) < 2:
        raise ConfigError(f"TOOL and FILE: give both. {usage}")
    tool, name, *pairs = arguments
    if tool not in TOOLS:
        raise ConfigError(f"{tool}: is not a tool; give {', '.join(TOOLS)}. {usage}")
    if name.startswith("-"):
        raise ConfigError(
            f"{name}: is not a file; write the command line to a file, such as train.sh. {usage}"
        )
    given = parse_pairs(pairs, KEYS)
    path = Path(expand_home("FILE", name))
    options, found = read(tool, path)
    if tool == "trl":
        found = take_ranks(options, path) | found
    options |= files_of(options, path)
    ranks = given.get("ranks") or found.get("ranks")
    count = whole_number({"ranks": ranks}, "ranks", 1, least=1) if ranks else None
    result = translate(tool, options, count, given.get("stage") or found.get("stage"), name)
    print(*command_page(result), sep="\n")


def command_page(result: Translation) -> list[str]:
    """Return the command, with one override on each line, and the lines of the comments below it."""
    texts = {key: SOURCE_TEXTS if key == "data.sources" else () for key in result.words}
    words = [
        f"{key}={hydra_value(value, texts=key in TEXTS, fields=texts[key])}"
        for key, value in result.words.items()
    ]
    lines = ["python -m runner", *(f"  {shlex.quote(word)}" for word in words)]
    out = [" \\\n".join(lines)]
    sections = {"Check": result.checks, "No equivalent here": result.missing, "Not needed": result.needless}
    for title, reasons in sections.items():
        if reasons:
            out += ["", f"# {title}:", *(f"#   {name}: {why}" for name, why in reasons.items())]
    return out


def read(tool: str, path: Path) -> tuple[Json, dict[str, str]]:
    """Return the options of a file, and a mapping with the ``stage`` and the ``ranks`` of a command line.

    The mapping is empty for a YAML or JSON file.

    Raises:
        ConfigError: if the file is of another kind, is missing, or cannot be read or parsed.
    """
    kinds = [".yaml", ".yml", ".json", *([".txt", ".sh"] if tool == "trl" else [])]
    if path.suffix not in kinds:
        raise ConfigError(f"{path}: is not a configuration of {tool}; give a file {', '.join(kinds)}.")
    if path.suffix not in (".txt", ".sh"):
        return read_options(path), {}
    try:
        return command_line(path.read_text(), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be parsed ({error}); correct it.") from error


def read_options(path: Path) -> Json:
    """Return the options of a YAML or JSON file, or raise ConfigError if it cannot be read."""
    try:
        node = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path.") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be parsed ({reason}); correct it.") from error
    if not isinstance(node, dict):
        raise ConfigError(f"{path}: is not a mapping of options to values; write it as OPTION: VALUE lines.")
    return {str(key).replace("-", "_"): value for key, value in node.items()}


def command_line(text: str, path: Path) -> tuple[Json, dict[str, str]]:
    """Parse the command line of a launcher, a script and its options; return what ``read`` returns.

    Raises:
        ConfigError: if a word after the script is not an option or the value of one.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, str] = {}
    end = start = 0  # after the launcher's last word, and of the script's first option
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        is_trl = before == "trl"  # trl sft: two words that name the script
        is_script = word.endswith(".py") or is_trl
        may_be_value = before.startswith("--") and "=" not in before
        if (script := SCRIPT.search(word)) and (is_script or not may_be_value):
            found["stage"] = "rm" if script[1] == "reward" else script[1]
        if is_script:
            end, start = number - is_trl, number + 1
            break
    launcher, options = flags(words[:end]), flags(words[start:])
    if stray := options.pop("", None):
        raise ConfigError(f"{path}: {stray} is not --OPTION; give the command line of one training script.")
    for name in {*PER_NODE} & {*launcher}:
        each, nodes = launcher[name], launcher.get(PER_NODE[name], 1)
        if isinstance(each, int) and isinstance(nodes, int):  # not "gpu", nor a range of nodes such as 1:4
            found["ranks"] = str(each * nodes)
    if "config" in options:  # TRL's file of options, which those of the command line override
        options = read_options(named_in(path, "config", options.pop("config"))) | options
    return options | {name: launcher[name] for name in ACCELERATE if name in launcher}, found


def take_ranks(options: Json, path: Path) -> dict[str, str]:
    """Take accelerate's options out of ``options``, which ``path`` gives; return the ``ranks`` that they set.

    Accelerate's own file becomes the Trainer's ``fsdp_config``, which has the same options.
    """
    count, *files = (options.pop(name, None) for name in ACCELERATE)
    config = next((file for file in files if file is not None), None)
    if config is not None:
        options["fsdp_config"] = config
        named = named_in(path, "config_file", config)
        if count is None and named.is_file():
            count = read_options(named).get("num_processes")
    return {"ranks": str(count)} if isinstance(count, int) else {}


def files_of(options: Json, path: Path) -> Json:
    """Return the contents of files of DeepSpeed and FSDP that ``path`` names and that exist, by option."""
    names = [name for name in FILES if isinstance(options.get(name), str)]
    files = {name: named_in(path, name, options[name]) for name in names}
    return {name: read_options(file) for name, file in files.items() if file.is_file()}


def named_in(path: Path, option: str, name: object) -> Path:
    """Return the file that ``option`` of ``path`` names, from the working directory or from path's folder."""
    named = Path(expand_home(option, str(name)))
    return named if named.is_file() else path.parent / named


def flags(words: Sequence[str]) -> Json:
    """Return the values of ``--name value``, ``--name=value`` and ``--name``.

    A name without a value has the value True, one with several values has a list. ``--no_NAME`` sets NAME to
    False, except ``--no_cuda``. Words before the first name have the name "".
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [scalar(value)] if equals else []
        else:
            found.setdefault(name, []).append(scalar(word))
    result = {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }
    off = {name[3:]: False for name in result if name.startswith("no_") and name != "no_cuda"}
    return {name: value for name, value in result.items() if name[3:] not in off} | off


def scalar(word: str) -> object:
    """Return ``word`` as a number, a boolean or a JSON mapping if it is one, else as text."""
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    is_number = isinstance(value, int | float) and NUMBER.fullmatch(word)
    return value if is_number or isinstance(value, bool) or word.startswith("{") else word


def main() -> NoReturn:
    sys.exit(run_or_answer(import_config, __doc__))
