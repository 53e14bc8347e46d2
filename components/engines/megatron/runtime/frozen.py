"""Parameters that stay as they are: no gradient buffer, no optimizer state, no place in a checkpoint."""

from collections.abc import Collection, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from components.engines.megatron.runtime.weights import Blocks


def freeze(
    chunks: Sequence[GPTModel], found: Blocks, names: Collection[str], *, recomputed: bool
) -> tuple[Blocks, Blocks]:
    """Freezes the parameters of ``found`` that hold the Hugging Face ones ``names``; (trained, frozen) ones.

    ``recomputed``: layers are computed again in the backward, which Megatron does only where their input
    asks for a gradient. Embedded tokens then ask for one, though a frozen embedding has no use for it.
    """
    kept: Blocks = {}
    for parameter, members in found.items():
        answers = {member.name in names for member in members}
        assert len(answers) == 1, f"{[m.name for m in members]}: one tensor, of which a part is frozen"
        if True in answers:
            parameter.requires_grad_(False)
            kept[parameter] = members
    for chunk in chunks:
        if recomputed and chunk.pre_process and len(chunk.decoder.layers):
            chunk.embedding.register_forward_hook(ask_for_gradient)
    return {p: members for p, members in found.items() if p not in kept}, kept


def ask_for_gradient(_module: object, _inputs: object, embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
