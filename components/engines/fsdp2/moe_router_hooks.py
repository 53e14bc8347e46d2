"""Hooks on transformers' routers that add the router losses and count the loads."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from components.contracts.batch import Batch
from components.engines.fsdp2.context_parallel import ContextParallel
from components.engines.fsdp2.grouped_experts import grouped_experts
from components.engines.fsdp2.mesh import CONTEXT, REPLICATE, SHARD, TENSOR
from components.engines.shared.moe_losses import (
    MoELosses,
    RoutedTokens,
    RouterOutput,
    RouterState,
    normalized,
)
from components.engines.shared.torch_private import flattened
from components.models.experts import BIAS
from components.models.moe_loss_config import MoELossConfig


class RouterHooks(RouterState):
    """Hooks on the routers of an MoE model. Only passes with gradients are counted."""

    def __init__(
        self, terms: MoELossConfig, lm: PreTrainedModel, ranks: DeviceMesh, device: torch.device
    ) -> None:
        self.gates, self.context = find_routers(lm), ContextParallel(ranks.get_group(CONTEXT))
        first: Any = self.gates[0]
        routers = MoELosses(
            terms,
            layers=len(self.gates),
            experts=first.num_experts,
            top_k=first.top_k,
            device=device,
            sharing=self.context.group,
            data=flattened(ranks[REPLICATE, SHARD, CONTEXT], "dp_cp").get_group()
            if terms.aux_loss == "global_batch"
            else None,
            counted=ranks.get_local_rank(TENSOR) == 0,
        )
        super().__init__(routers, drops=False)
        self.tokens: RoutedTokens | None = None
        self.seen: dict[int, Tensor] = {}
        """Load of each layer in the first pass over the current micro-batch."""
        for layer, gate in enumerate(self.gates):
            gate.register_forward_hook(partial(self._attach, layer))

    def see(self, batch: Batch) -> None:
        """Begin a micro-batch; every rank that shares its rows calls this method."""
        sequences = self.context.shard(batch.real_sequence_ids(), -1)
        self.tokens, self.seen = RoutedTokens(sequences.reshape(-1), batch.seqlens), {}

    def abort(self) -> None:
        self.tokens, self.seen = None, {}

    @torch.no_grad()
    def update_biases(self) -> None:
        """Apply the same update to the router biases on every rank, after a step that was not skipped."""
        for layer, gate in enumerate(self.gates):
            if (change := self.bias_change(layer)) is not None:
                gate.get_buffer(BIAS).add_(change)

    @torch.compiler.disable
    def _attach(
        self, layer: int, gate: nn.Module, _: object, routed: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Replace the weights in the output ``(logits, weights, chosen)`` of a transformers router."""
        if not torch.is_grad_enabled():
            return None
        assert self.tokens is not None, "a pass that is trained begins with its tokens"
        logits, weights, chosen = routed
        found = RouterOutput(logits, router_scores(gate, logits), chosen)
        # A second pass of a layer over the same micro-batch is a recomputation.
        again = self.seen.get(layer)
        weights, self.seen[layer] = self.routers.attach(weights, layer, found, self.tokens, recomputed=again)
        return logits, weights, chosen


def find_routers(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the routers in the order of layers; a model without experts has none."""
    names = (name.removesuffix("experts") + "gate" for name in grouped_experts(lm))
    return [lm.get_submodule(name) for name in names]


def router_scores(gate: nn.Module, logits: Tensor) -> Tensor:
    """Return the scores, float32 ``[T, E]``, with sum 1 for each token.

    They are the softmax of the logits. For routers with biases (DeepSeek's), they are normalized sigmoids.
    """
    if not hasattr(gate, BIAS):
        return logits.softmax(-1, dtype=torch.float32)
    return normalized(logits.float().sigmoid())
