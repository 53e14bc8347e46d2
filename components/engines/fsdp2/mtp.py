"""Multi-token prediction with transformers' decoder layers: see ``components.models.mtp``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.json_types import Json
from components.models.mtp import mtp_layers


class MTPHead:
    """The MTP layers of ``lm`` by depth, which are also blocks of ``lm``. So this class is not a module.

    An instance must be created before any block is wrapped, because it sets the forward of the layers to
    ``layer(hidden, embedded, **others)``.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.layers = mtp_layers(lm)
        self.seen: Json = {}
        """Arguments of the last main layer besides hidden states, such as masks and positions."""
        base = lm.base_model
        for layer in self.layers:
            layer.forward = mtp_forward(layer)
        if self.layers:
            last = base.layers[-len(self.layers) - 1]
            last.register_forward_pre_hook(self._see, with_kwargs=True)

    def __call__(
        self, hidden: Tensor, ids: Sequence[Tensor], embed: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        """Yield the normalized hidden states ``[B, L, H]`` of every depth.

        Call it once after each forward pass of the model, because it uses the masks and positions of that
        pass.

        Args:
            hidden: output of the last norm in that forward pass, ``[B, L, H]``.
            ids: for each depth k, from 1: the tokens k positions later, int64 ``[B, L]``.
            embed: function that returns the embeddings ``[B, L, H]`` of such tokens.
        """
        seen, self.seen = self.seen, {}
        for layer, tokens in zip(self.layers, ids, strict=True):
            hidden = layer(hidden, embed(tokens), **seen)
            yield hidden

    def _see(self, _: nn.Module, __: tuple[object, ...], kwargs: Json) -> None:
        self.seen = {name: value for name, value in kwargs.items() if name != "hidden_states"}


def mtp_forward(layer: Any) -> Callable[..., Tensor]:
    """Return the forward function of an MTP layer.

    It concatenates the normalised embeddings of later tokens with the normalised hidden states, projects
    them, runs the decoder layer, and applies the final norm.
    """
    own = layer.forward

    def forward(hidden: Tensor, embedded: Tensor, **others: object) -> Tensor:
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1)
        normed: Tensor = layer.shared_head.norm(own(layer.eh_proj(joined), **others))
        return normed

    return forward
