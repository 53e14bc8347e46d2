"""Initial weights from a checkpoint (``checkpoint.init_from``)."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.checkpoint.folder import read_meta
from components.checkpoint.reader import StoredTensors
from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError
from components.models.pretrained import unused_names

INIT_FROM = "checkpoint.init_from"
"""The option that names the checkpoint."""


def checkpoint_content(folder: Path) -> str:
    """Return a hash of the checksums recorded when the checkpoint ``folder`` was written."""
    files = read_meta(folder).files
    sums = {name: record.xxh3 for name, record in files.items() if name.endswith(".distcp")}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def checkpoint_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    option: str,
    *,
    kind: str = "model",
    without_mtp: PreTrainedModel | None = None,
) -> WeightSource:
    """Return a source of the tensors ``shapes`` from the checkpoint ``folder``.

    Their keys have the prefix ``kind``, with which the checkpoint may have no other tensors. If the optimizer
    has other weights for evaluations, such as an average, ``model`` means these weights. If the model
    ``without_mtp`` is given, layers for multi-token prediction that it lacks are ignored.

    Raises:
        ConfigError: (naming ``option``) if a tensor is missing, superfluous or of another shape.
    """
    tensors = StoredTensors(folder)
    if kind == "model":
        kind = tensors.kind_to_evaluate
    stored = tensors.shapes(kind)
    if without_mtp is not None:
        kept = set(unused_names(stored, without_mtp))
        stored = {name: shape for name, shape in stored.items() if name in shapes or name in kept}
    check_shapes(folder, stored, shapes, option)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return tensors.read(f"{kind}/{name}", index)

    return read


def check_shapes(
    folder: Path, stored: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size], option: str
) -> None:
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted]
    if any(name.endswith(".lora_A.weight") for name in extra):
        raise ConfigError(
            f"{option}: {folder} holds an adapter, and not of this model; continue an adapter with "
            "adapter.path=RUN/export."
        )
    if missing and not extra:
        raise ConfigError(
            f"{option}: {folder} lacks {missing[0]} ({len(missing)} missing): its run trained a part of the "
            "model, or a smaller one; use model.path=RUN/export, or the model options of its run."
        )
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has the unexpected {extra[0]}"
        raise ConfigError(
            f"{option}: {folder} {what} ({len(missing)} missing, {len(extra)} too many); it is of another "
            "model: use the model options of its run."
        )
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise ConfigError(
                f"{option}: {folder}: {name} is {list(stored[name])}, but the model needs {list(shape)}; "
                "use the model options of its run."
            )
