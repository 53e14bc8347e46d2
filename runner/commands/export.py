"""``python -m runner.export checkpoint=DIR output=DIR``: the model in a checkpoint, for other programs.

checkpoint=DIR  a checkpoint folder, or a run folder, whose newest complete checkpoint is used. If the run
                trains an adapter, the output is an adapter folder, or with merge=true the merged model
adapter=DIR     instead of checkpoint, with merge=true: an adapter folder, which is merged into its base model
base=DIR        only with adapter: the base model, if it is not at the path recorded in the adapter
mtp=false       only with checkpoint: without the layers for multi-token prediction, which vLLM refuses in
                other models than DeepSeek's
hook=ema        only with checkpoint: the average of the weights that the run's hook of this name keeps
dtype=fp32      or bf16 or fp16, of the written weights; default: that of checkpoint's run, fp32 with adapter
trust=[MODULE]  only with checkpoint: further modules whose classes the run's config.yaml may name
trust_remote_code=true  run the code that the run's model, or the adapter's base model, brings with it
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import ConfigError
from runner.cli import announce_loading, run_or_answer
from runner.commands.arguments import Keys, first_line, parse_pairs

KEYS: Keys = {
    **dict.fromkeys(("checkpoint", "adapter", "output", "base", "hook", "trust")),
    "merge": ("true", "false"),
    "mtp": ("true", "false"),
    "dtype": ("fp32", "bf16", "fp16"),
    "trust_remote_code": ("true", "false"),
}


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Parse the KEY=VALUE arguments.

    Raises:
        ConfigError: if an argument is not KEY=VALUE, or a key or value is unknown, missing, or not read.
    """
    given = parse_pairs(arguments, KEYS, "output", usage=__doc__)
    if ("checkpoint" in given) == ("adapter" in given):
        have = "both are given" if "adapter" in given else "is missing"
        raise ConfigError(f"checkpoint, adapter: {have}; give one of them. Usage: {first_line(__doc__)}")
    if "adapter" in given and given.get("merge") != "true":
        raise ConfigError(
            "merge: must be true with adapter, because an adapter that is not merged needs no export; add "
            "merge=true."
        )
    if "base" in given and "adapter" not in given:
        raise ConfigError("base: is not read with checkpoint, whose run determines the model; leave it out.")
    if "trust" in given and "adapter" in given:
        raise ConfigError("trust: is not read with adapter, which names no class; leave it out.")
    if "mtp" in given and "adapter" in given:
        raise ConfigError("mtp: is not read with adapter, which has no such layers; leave it out.")
    if "hook" in given and "adapter" in given:
        raise ConfigError("hook: is not read with adapter, which holds no average; leave it out.")
    return given


def export(arguments: Sequence[str]) -> None:
    given = parse(arguments)
    announce_loading()
    if "checkpoint" in given:
        print(export_checkpoint(given))
        return
    from components.adapters.merge import merge_adapter
    from runner.training.assembly import DTYPES

    dtype = DTYPES[given.get("dtype", "fp32")]
    base, trusts = given.get("base"), given.get("trust_remote_code") == "true"
    print(merge_adapter(given["adapter"], given["output"], base=base, dtype=dtype, trust_remote_code=trusts))


def export_checkpoint(given: Mapping[str, str]) -> Path:
    """Export the checkpoint that ``given`` names, and return the written folder.

    The config of the checkpoint's run describes the model.

    Raises:
        ConfigError: if the checkpoint cannot be read, the output folder is not empty, or ``merge``,
            ``mtp`` or ``dtype`` does not apply to the checkpoint.
    """
    from components.adapters.merge import new_folder
    from components.checkpoint.dcp import saved_keys
    from runner.commands.trained_model import read_checkpoint
    from runner.training.assembly import DTYPES

    merge, target = given.get("merge") == "true", new_folder(given["output"])
    trained, stored = read_checkpoint(given)
    if "mtp" in given and not trained.model.mtp.num_layers:
        raise ConfigError("mtp: the run has no layers for multi-token prediction; leave it out.")
    if "hook" in given:
        trained = replace(trained, kind=f"hook/{given['hook']}")
        if not any(key.startswith(f"{trained.kind}/") for key in saved_keys(trained.checkpoint)):
            raise ConfigError(
                f"hook: {trained.checkpoint} holds no average of a hook {given['hook']}; give a hook of its "
                "run, such as ema, or leave it out."
            )
    dtype = DTYPES[given["dtype"]] if "dtype" in given else None
    if trained.adapter is None and merge:
        raise ConfigError("merge: the checkpoint is of a whole model, not of an adapter; leave it out.")
    if trained.adapter is None or merge:
        return trained.export_model(target, dtype or stored, mtp=given.get("mtp") != "false")
    if dtype is not None:
        raise ConfigError("dtype: an adapter is kept in fp32; leave it out, or use merge=true.")
    return trained.export_adapter(target, stored)


def main() -> NoReturn:
    sys.exit(run_or_answer(export, __doc__))
