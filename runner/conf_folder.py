"""The folders of config files: the options of each group, and the keys of the composed default config."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from components.json_text import leaves
from runner.config.command_line import long_flags


def config_dir() -> str:
    """Return the path of conf/: inside the installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parent
    return str(next(path for path in (here / "conf", here.parent / "conf") if path.is_dir()))


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
