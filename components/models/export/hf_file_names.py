"""Parameter names in the files of a model family, if they differ from those of the model in memory."""

import re
from collections.abc import Callable

Rename = Callable[[str], str]

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MIXTRAL_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)(?=\.)")


def mixtral(name: str) -> str:
    """Rename ``...mlp.experts.3.gate_proj.weight`` to ``...block_sparse_moe.experts.3.w1.weight``."""
    renamed = MIXTRAL_EXPERT.sub(lambda found: found[1] + MIXTRAL[found[2]], name)
    return renamed.replace(".mlp.", ".block_sparse_moe.")


def file_names(model_type: str) -> Rename:
    """Return the function from tensor names in memory to those in the files of ``model_type``."""
    return mixtral if model_type == "mixtral" else lambda name: name


def module_name(name: str, model_type: str) -> str:
    """Return the name of a module in files, given its full name in memory or the last part of that name."""
    if model_type == "mixtral" and name in MIXTRAL:
        return MIXTRAL[name]
    return file_names(model_type)(f"{name}.").removesuffix(".")


def our_name(name: str, model_type: str) -> str:
    """Return the name of a module in memory, given its name in files; the inverse of ``module_name``."""
    if model_type != "mixtral":
        return name
    leaves = {theirs: ours for ours, theirs in MIXTRAL.items()}
    parts = [leaves.get(part, part) for part in name.replace("block_sparse_moe", "mlp").split(".")]
    return ".".join(parts)
