"""MoE routers in Megatron's layers, with the expert choice of transformers and this project's losses."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import Router as MegatronRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.batch import Batch
from components.contracts.device_copy import to_device
from components.engines.megatron.moe_config import MoEConfig, read_moe_config
from components.engines.megatron.runtime.cp_sharding import CPShard
from components.engines.shared.moe_losses import (
    MoELosses,
    RoutedTokens,
    RouterOutput,
    RouterState,
    normalized,
)
from components.models.experts import moe_blocks
from components.models.moe_loss_config import MoELossConfig


@dataclass(frozen=True)
class TokenRouting:
    """The input of a rank's routers for one micro-batch."""

    tokens: RoutedTokens
    """This rank's tokens, in the order of the input of MoE layers."""
    routers: MoELosses | None
    """The router losses and counts. None means that nothing is counted or added to the loss."""


def token_routing(
    batch: Batch, row: CPShard, routers: MoELosses | None, device: torch.device, *, split: bool
) -> TokenRouting:
    """Return the router input for this rank's share of ``batch``.

    ``split`` means that the share is also split over tp ranks (sequence parallelism). Layers compute
    ``[s, b, h]``, so the first tokens of all rows come first, then their second tokens.
    """
    own = row.scatter(batch.real_sequence_ids(), fill=-1).transpose(0, 1)
    if split:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        own = own.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    tokens = RoutedTokens(to_device(own.reshape(-1), device), to_device(batch.seqlens, device))
    return TokenRouting(tokens, routers)


class Router(MegatronRouter):
    """A router that chooses experts as the routers of transformers do.

    The capacity of an expert is computed as in Megatron, from the number of this rank's positions including
    padding, but padding does not use it up. If an expert drops a token, the weights of the token's other
    experts are not increased.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config, pg_collection)
        self.experts: MoEConfig = config.experts
        self.layer = -1
        """Index among the MoE layers of the whole model."""
        self.token_routing: TokenRouting | None = None
        """Input for the micro-batch in the current forward pass of the chunk."""
        self.recompute_queue: deque[tuple[TokenRouting, Tensor]] = deque()
        """Input and load of the micro-batches that the backward pass will recompute. Every schedule runs the
        backward passes of a chunk in the order of its forward passes."""
        if self.experts.biased:
            bias = torch.zeros(self.num_experts, device=torch.cuda.current_device())
            self.expert_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return expert weights and the mask of chosen experts, both ``[s * b, E]``, from ``[s, b, h]``."""
        return self.routing(self.gating(hidden.flatten(0, 1)))

    def gating(self, hidden: Tensor) -> Tensor:
        if self.experts.fp32:
            return F.linear(hidden.float(), self.weight.float())
        return F.linear(hidden, self.weight)

    def routing(self, logits: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores, chosen, weights = choose_experts(logits, self.experts, getattr(self, "expert_bias", None))
        traffic, load = self._next()
        given = torch.zeros_like(scores).scatter(1, chosen, weights)
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        dropped = None
        if self.config.moe_expert_capacity_factor is not None:
            given, taken = self._drop(given, taken, traffic.tokens)
            dropped = ~taken.gather(1, chosen)
        if traffic.routers is not None:
            balanced = scores if self.experts.score == "softmax" else normalized(scores)
            routed = RouterOutput(logits, balanced, chosen, dropped)
            given, made = traffic.routers.attach(given, self.layer, routed, traffic.tokens, recomputed=load)
            if not torch.is_grad_enabled():
                self.recompute_queue.append((traffic, made))
        return given, taken

    def _next(self) -> tuple[TokenRouting, Tensor | None]:
        """Return the router input of the current micro-batch and, when recomputing, its saved load."""
        if self.recompute_queue and torch.is_grad_enabled():
            return self.recompute_queue.popleft()
        assert self.token_routing is not None, "a router that was told of no micro-batch"
        return self.token_routing, None

    def _drop(self, weights: Tensor, taken: Tensor, tokens: RoutedTokens) -> tuple[Tensor, Tensor]:
        real = (tokens.sequences >= 0)[:, None]
        preferred = weights = weights * real
        taken = taken & real
        if self.config.moe_token_drop_policy == "position":
            # Megatron's own policy of this name keeps arbitrary tokens: all of them are equal in its topk.
            preferred = taken * torch.arange(len(taken), 0, -1, device=taken.device)[:, None]
        _, kept = apply_router_token_dropping(
            preferred,
            taken,
            router_topk=self.experts.top_k,
            capacity_factor=self.config.moe_expert_capacity_factor,
            pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
        )
        return weights * kept, kept


def choose_experts(logits: Tensor, experts: MoEConfig, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores float32 ``[T, E]``, chosen experts int64 ``[T, K]`` and their weights ``[T, K]``.

    The choice from ``logits`` ``[T, E]`` follows Qwen3MoeTopKRouter, MixtralTopKRouter and
    DeepseekV3TopkRouter of transformers.
    """
    scores = logits.float().softmax(-1) if experts.score == "softmax" else logits.float().sigmoid()
    preferred = scores.detach() if bias is None else scores.detach() + bias
    if experts.groups > 1:
        grouped = preferred.unflatten(1, (experts.groups, -1))
        kept = grouped.topk(2, dim=-1)[0].sum(-1).topk(experts.kept_groups, sorted=False)[1]
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, False)
        preferred = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    chosen = preferred.topk(experts.top_k, sorted=experts.groups == 1)[1]
    weights = scores.gather(1, chosen)
    if experts.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if experts.score == "sigmoid" else 0))
    return scores, chosen, weights * experts.scaling


def find_routers(modules: Iterable[nn.Module]) -> list[Router]:
    return [router for module in modules for router in module.modules() if isinstance(router, Router)]


class MegatronRouterState(RouterState):
    """The router state of one rank. Every rank has one, even if its pipeline stage has no MoE layer."""

    def __init__(
        self,
        terms: MoELossConfig,
        meta: PreTrainedModel,
        layers: Sequence[Router],
        device: torch.device,
        *,
        drops: bool,
    ) -> None:
        """Create the state for this rank's routers ``layers`` of ``meta``, a model with experts."""
        experts = read_moe_config(meta.config)
        assert experts is not None
        routers = MoELosses(
            terms,
            layers=len(moe_blocks(meta)),
            experts=experts.number,
            top_k=experts.top_k,
            device=device,
            sharing=parallel_state.get_tensor_and_context_parallel_group(),
            data=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            counted=True,
        )
        super().__init__(routers, drops=drops)
        self.layers = layers

    def begin(self, counts: Mapping[str, int] | None, factor: float = 1.0) -> None:
        super().begin(counts, factor)
        self.abort()

    def abort(self) -> None:
        for layer in self.layers:
            layer.recompute_queue.clear()

    def finish(self, loss: float) -> tuple[float, dict[str, float]]:
        assert not any(layer.recompute_queue for layer in self.layers), "a layer that was not computed again"
        return super().finish(loss)

    @torch.no_grad()
    def update_biases(self) -> None:
        for layer in self.layers:
            if (change := self.bias_change(layer.layer)) is not None:
                layer.expert_bias.add_(change)


def clear_router_state(chunks: Iterable[nn.Module]) -> None:
    """Drop the tensors that Megatron's token dispatchers keep from the last pass.

    These tensors hold the autograd graph of that pass, which refers to the model. Without this function, the
    model and the threads of its process groups would never be freed.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, MoELayer):
            held = vars(module.token_dispatcher)
            held |= {name: None for name, value in held.items() if isinstance(value, Tensor)}
