"""``python -m runner.export checkpoint=DIR output=DIR``: the model in a checkpoint, for other programs.

checkpoint=DIR  a checkpoint folder, or a run folder, whose newest complete checkpoint is used. If the run
                trains an adapter, the output is an adapter folder, or with merge=true the merged model
adapter=DIR     instead of checkpoint, with merge=true: an adapter folder, which is merged into its base model
base=DIR        only with adapter: the base model, if it is not at the path recorded in the adapter
dtype=fp32      or bf16: dtype of the written weights; default: that of checkpoint's run, fp32 with adapter
trust=[MODULE]  only with checkpoint: further modules whose classes the run's config.yaml may name
trust_remote_code=true  only with checkpoint: run the code that the run's model brings with it
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import ConfigError
from components.home import expand_home
from runner.cli import run_or_answer
from runner.config.sources import ConfigSources, did_you_mean

KEYS = {
    "checkpoint": None,
    "adapter": None,
    "output": None,
    "merge": ("true", "false"),
    "base": None,
    "dtype": ("fp32", "bf16"),
    "trust": None,
    "trust_remote_code": ("true", "false"),
}
"""The allowed values of each key. None means that any value is allowed."""


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Parse the KEY=VALUE arguments.

    Raises:
        ConfigError: if an argument is not KEY=VALUE, or a key or value is unknown, missing, or not read.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals:
            raise ConfigError(f"{argument}: is not KEY=VALUE with a known key; {did_you_mean(key, KEYS)}")
        allowed = KEYS[key]
        if allowed is not None and value not in allowed:
            raise ConfigError(f"{argument}: must be {' or '.join(allowed)}.")
        given[key] = expand_home(key, value)
    if "output" not in given:
        raise ConfigError(f"output: is missing. Usage: {(__doc__ or '').splitlines()[0]}")
    if ("checkpoint" in given) == ("adapter" in given):
        have = "both are given" if "adapter" in given else "is missing"
        raise ConfigError(f"checkpoint, adapter: {have}; give one of them. Usage: {usage()}")
    if "adapter" in given and given.get("merge") != "true":
        raise ConfigError(
            "merge: must be true with adapter; without, the adapter's own folder is the export."
        )
    if "base" in given and "adapter" not in given:
        raise ConfigError("base: is not read with checkpoint, whose run determines the model; leave it out.")
    for key in ("trust", "trust_remote_code"):
        if key in given and "adapter" in given:
            raise ConfigError(f"{key}: is not read with adapter, which names no code; leave it out.")
    return given


def usage() -> str:
    return (__doc__ or "").splitlines()[0]


def export(arguments: Sequence[str]) -> None:
    given = parse(arguments)
    if "checkpoint" in given:
        print(export_checkpoint(given))
        return
    from components.adapters.merge import merge_adapter
    from runner.training.rank import DTYPES

    dtype = DTYPES[given.get("dtype", "fp32")]
    print(merge_adapter(given["adapter"], given["output"], base=given.get("base"), dtype=dtype))


def export_checkpoint(given: Mapping[str, str]) -> Path:
    """Export a checkpoint, described by the config of its run; return the written folder."""
    from components.adapters.merge import new_folder
    from components.checkpoint import resolve_checkpoint
    from components.checkpoint.to_hf import CheckpointModel
    from runner.config.instantiate import build_component
    from runner.launch.run_dir import read_run_config
    from runner.training.rank import DTYPES

    point = resolve_checkpoint("checkpoint", given["checkpoint"])
    run = point.parent.parent
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint: {run} has no config.yaml, which describes the model; give one in a run's folder."
        )
    config = read_run_config(run)
    seed, stored = config["run"].get("seed"), DTYPES.get(str(config["run"].get("dtype")))
    if not isinstance(seed, int) or stored is None:
        raise ConfigError(
            f"{run / 'config.yaml'}: run.seed or run.dtype has no value of its kind; restore it."
        )
    target = new_folder(given["output"])
    where = ConfigSources(run_folder=run, trusted=trusted_modules(given.get("trust", "[]")))
    model, adapter = (build_component(group, config[group], where) for group in ("model", "adapter"))
    if model.trust_remote_code and given.get("trust_remote_code") != "true":
        raise ConfigError(
            f"model.trust_remote_code ({where.of('model')}): is true, so {model.path} brings its own code; "
            "read it, then give trust_remote_code=true."
        )
    trained = CheckpointModel(model, adapter, point, run, seed, config["checkpoint"].get("init_from"))
    dtype = DTYPES[given["dtype"]] if "dtype" in given else None
    if adapter is None:
        if given.get("merge") == "true":
            raise ConfigError("merge: the checkpoint is of a whole model, not of an adapter; leave it out.")
        return trained.export_model(target, dtype or stored)
    if given.get("merge") == "true":
        return trained.export_merged(target, dtype or stored)
    if dtype is not None:
        raise ConfigError("dtype: an adapter is kept in fp32; leave it out, or use merge=true.")
    return trained.export_adapter(target, stored)


def trusted_modules(value: str) -> tuple[str, ...]:
    """Parse ``[MODULE,...]`` or ``MODULE``; raise ConfigError if a part is not the name of a module."""
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    found = tuple(name for name in names if name)
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"trust: {name!r} is not the name of a module; give trust=[my.module].")
    return found


def main() -> NoReturn:
    sys.exit(run_or_answer(export, __doc__))
