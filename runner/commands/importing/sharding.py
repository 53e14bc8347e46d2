"""The options of DeepSpeed and FSDP that decide what is sharded, as options of FSDP2."""

import re
from pathlib import PurePath

from components.json_text import leaves
from runner.commands.importing.translation import Translation, as_list

FILES = ("deepspeed", "fsdp_config")
"""Options that may name a file, whose contents then replace the name."""
OPTIONS = (*FILES, "fsdp", "fsdp_version")
STAGES = {"0": "no_shard", "1": "shard_grad_op", "2": "shard_grad_op"}
"""Stage of ZeRO -> strategy of FSDP; the third is FSDP's default, ``full_shard``."""
STRATEGIES = {
    **dict.fromkeys(("true", "1", "none"), "full_shard"),
    **{"false": "shard_grad_op", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"},
    "5": "hybrid_shard_zero2",
}
"""Values of FSDP's options -> strategy. A strategy may also be given by its name."""
KNOWN = {*STRATEGIES.values(), "offload"}
STAGE_IN_NAME = re.compile(r"z(?:ero)?_?([0-3])")


def choose_sharding(work: Translation, dp: int) -> bool:
    """Set the keys of FSDP2 that options of DeepSpeed and FSDP imply, for ``dp`` ranks of data parallelism.

    Return whether there are such options. The name of a file that was not found may contain the stage.
    """
    given = {name: work.left.pop(name, None) for name in OPTIONS}
    wanted = {strategy for option in given.values() for strategy in strategies(option)}
    if "hybrid_shard_zero2" in wanted:
        wanted |= {"hybrid_shard", "shard_grad_op"}
    if "no_shard" in wanted and dp > 1:
        work.words["parallelism.dp_replicate"] = dp
    elif "shard_grad_op" in wanted:
        work.words["parallelism.reshard_after_forward"] = False
    if "offload" in wanted:
        work.words["parallelism.cpu_offload"] = True
    if "hybrid_shard" in wanted:
        work.checks["parallelism.dp_replicate"] = "hybrid shards need it: the number of copies of the model"
    for unknown in sorted(wanted - KNOWN):
        work.checks["parallelism.reshard_after_forward"] = f"{unknown} is not a strategy here; true is ZeRO-3"
    if missing := [given[name] for name in FILES if isinstance(given[name], str)]:
        work.checks["parallelism"] = (
            f"{missing[0]} was not found; fsdp2 is ZeRO-3, ZeRO-2 is "
            "parallelism.reshard_after_forward=false, and offloading parallelism.cpu_offload=true"
        )
    return any(given.values())


def strategies(option: object) -> set[str]:
    """Return the strategies and ``offload`` that an option stands for."""
    if isinstance(option, dict):
        return {found for key, value in leaves(option) if (found := strategy(key, str(value).lower()))}
    text = " ".join(map(str, as_list(option)))
    name = PurePath(text).stem
    words = {word for word in text.split() if word in STRATEGIES.values()}
    if (stage := STAGE_IN_NAME.search(name)) and stage[1] in STAGES:
        words.add(STAGES[stage[1]])
    return words | ({"offload"} if "offload" in name else set())


def strategy(key: str, value: str) -> str | None:
    """Return the strategy that one option of a file stands for; ``key`` has the names of its sections."""
    name = key.rpartition(".")[2].removeprefix("fsdp_")
    if key.endswith(("zero_optimization.stage", "zero_stage")):
        return STAGES.get(value)
    if name in ("reshard_after_forward", "sharding_strategy"):
        return STRATEGIES.get(value, value)
    offloads = name == "offload_params" and value == "true"
    if offloads or ("offload_" in key and name.endswith("device") and value in ("cpu", "nvme")):
        return "offload"
    return None
