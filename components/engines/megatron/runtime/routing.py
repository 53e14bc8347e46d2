"""The routers of this rank in the steps of the engine: their terms of the loss, loads and biases."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.engines.megatron.experts import experts_of
from components.engines.megatron.runtime.groups import same_batch, same_microbatch
from components.engines.megatron.runtime.router import Router
from components.engines.router_steps import RouterSteps
from components.engines.routers import Routers
from components.models.experts import routed
from components.models.routing import RouterTerms


class Routing(RouterSteps):
    """Every rank has one, be there layers of experts in its pipeline stage or none."""

    def __init__(self, routers: Routers, layers: Sequence[Router], *, drops: bool) -> None:
        super().__init__(routers, drops=drops)
        self.layers = layers

    @classmethod
    def build(
        cls,
        terms: RouterTerms,
        meta: PreTrainedModel,
        layers: Sequence[Router],
        device: torch.device,
        *,
        drops: bool,
    ) -> "Routing | None":
        """None: ``meta`` has no experts. ``layers``: those of this rank."""
        experts = experts_of(meta.config)
        if experts is None:
            return None
        routers = Routers(
            terms,
            layers=len(routed(meta)),
            experts=experts.number,
            top_k=experts.top_k,
            device=device,
            sharing=same_microbatch(),
            data=same_batch(),
            counted=True,
        )
        return cls(routers, layers, drops=drops)

    def begin(self, counts: Mapping[str, int] | None) -> None:
        super().begin(counts)
        self.abort()

    def abort(self) -> None:
        for layer in self.layers:
            layer.again.clear()

    def finish(self, loss: float) -> tuple[float, dict[str, float]]:
        assert not any(layer.again for layer in self.layers), "a layer that was not computed again"
        return super().finish(loss)

    @torch.no_grad()
    def update_biases(self) -> None:
        for layer in self.layers:
            if (change := self.bias_change(layer.layer)) is not None:
                layer.expert_bias.add_(change)


def forget_last_pass(chunks: Iterable[nn.Module]) -> None:
    """Megatron's dispatchers keep tensors of it, and these its graph, at whose ends is the model: nothing of
    all that would ever be freed, threads of process groups among it."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, MoELayer):
            held = vars(module.token_dispatcher)
            held |= {name: None for name, value in held.items() if isinstance(value, Tensor)}
