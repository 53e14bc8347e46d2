"""Layers for further tokens around transformers' own decoder layers: see ``components.models.mtp``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.json_types import Json
from components.models.mtp import mtp_layers


class MTPHead:
    """The layers of ``lm`` by depth; no module, as they are blocks of ``lm`` already.

    Made before anything wraps a block: it gives the layers their forward pass,
    ``layer(hidden, embedded, **others)``.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.layers = mtp_layers(lm)
        self.seen: Json = {}
        """What the last of the other layers was called with beside hidden states: masks, positions."""
        base = lm.base_model
        for layer in self.layers:
            layer.forward = mtp_forward(layer)
        if self.layers:
            last = base.layers[-len(self.layers) - 1]
            last.register_forward_pre_hook(self._see, with_kwargs=True)

    def __call__(
        self, hidden: Tensor, ids: Sequence[Tensor], embed: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        """The normed hidden states ``[B, L, H]`` of every depth.

        Args:
            hidden: of the last norm, from the pass that has just been.
            ids: int64 ``[B, L]``, by depth: the tokens so much further on.
        """
        seen, self.seen = self.seen, {}
        for layer, tokens in zip(self.layers, ids, strict=True):
            hidden = layer(hidden, embed(tokens), **seen)
            yield hidden

    def _see(self, _: nn.Module, __: tuple[object, ...], kwargs: Json) -> None:
        self.seen = {name: value for name, value in kwargs.items() if name != "hidden_states"}


def mtp_forward(layer: Any) -> Callable[..., Tensor]:
    """A forward pass of ``layer`` that begins with the further tokens and ends with the norm."""
    own = layer.forward

    def forward(hidden: Tensor, embedded: Tensor, **others: object) -> Tensor:
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1)
        normed: Tensor = layer.shared_head.norm(own(layer.eh_proj(joined), **others))
        return normed

    return forward
