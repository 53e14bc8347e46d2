"""What the routers of a rank add to the loss of a train step, and what they count. Both engines use it.

Every layer of experts calls ``Routers.attach`` once in its forward pass. The terms are sums over real tokens;
their gradients enter through the weights of the chosen experts, scaled such that the engine's one division by
the main count makes means of them. Nothing is read back from the device before the step ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.contracts.batch import Batch
from components.models.moe_config import AUX, MoELossConfig, Z


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of one micro-batch that a rank's routers see, in their order."""

    sequences: Tensor
    """int64 ``[T]`` on the device: which sequence of the micro-batch each belongs to; -1 is padding."""
    lengths: Tensor
    """``[S]`` on the device: real tokens of each sequence of the micro-batch, on whatever rank they are."""

    @classmethod
    def of(cls, batch: Batch) -> "RoutedTokens":
        """All of ``batch``, flattened."""
        return cls(batch.real_sequence_ids().reshape(-1), batch.seqlens)


@dataclass(frozen=True)
class RouterOutput:
    """What the router of one layer says of ``T`` tokens."""

    logits: Tensor
    """``[T, E]``"""
    scores: Tensor
    """float32 ``[T, E]``, differentiable: probabilities over all experts."""
    chosen: Tensor
    """int64 ``[T, K]``: experts."""
    dropped: Tensor | None = None
    """bool ``[T, K]``: choices that a capacity has dropped. None: none."""


class MoELosses:
    """The routers of one rank in one train step after another.

    ``layers``: how many layers of experts the whole model has; each rank has some. ``sharing``: the ranks
    that see other tokens of the same micro-batches; ``data``: those that see other tokens of the same global
    batch, the former among them. None: there is no other.
    ``counted``: False on a rank whose tokens another one has too, in the same layers: that one counts them.
    """

    def __init__(
        self,
        terms: MoELossConfig,
        *,
        layers: int,
        experts: int,
        top_k: int,
        device: torch.device,
        sharing: dist.ProcessGroup | None,
        data: dist.ProcessGroup | None,
        counted: bool,
    ) -> None:
        self.terms, self.experts, self.top_k, self.device = terms, experts, top_k, device
        self.sharing, self.data, self.counted = sharing, data, counted
        self.table = torch.zeros(layers, experts + 3, dtype=torch.float64, device=device)
        """Of every layer: tokens by expert, choices that were dropped, and the sums of the two terms."""
        self.so_far = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        """Tokens by expert in the global batch up to now, of all data ranks, in the layers of this rank."""
        self.scales: Mapping[str, float] = {}

    def begin(self, counts: Mapping[str, int], n_main: int) -> None:
        """A train step begins, with the global ``counts`` of the terms."""
        strengths = self.terms.coefficients.items()
        self.scales = {name: value * n_main / max(counts[name], 1) for name, value in strengths}
        self.table.zero_()
        self.so_far.zero_()

    def attach(
        self,
        weights: Tensor,
        layer: int,
        routed: RouterOutput,
        tokens: RoutedTokens,
        *,
        recomputed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``weights`` (any shape, of the chosen experts), through which the layer's terms get their gradient.

        Collective over ``sharing``, or with global_batch over ``data``.

        Args:
            layer: counted among the layers of experts of the whole model.
            recomputed: what the first pass over these tokens returned beside the weights, where a backward
                pass computes the layer again: nothing is counted a second time.

        Returns:
            the weights, and the load (``f`` above, ``[E]`` or ``[S, E]``) that the balance loss was made of.
        """
        real = (tokens.sequences >= 0).float()
        sums: dict[str, Tensor] = {}
        load = self._load(layer, routed, tokens, real) if recomputed is None else recomputed
        if AUX in self.scales:
            sums[AUX] = self._balance(routed.scores, tokens, real, load)
        if Z in self.scales:
            sums[Z] = (routed.logits.float().logsumexp(-1).square() * real).sum()
        if recomputed is None and self.counted:
            self._record(layer, routed, real, sums)
        if not self.counted or not sums:
            return weights, load
        objective = torch.stack([value * self.scales[name] for name, value in sums.items()]).sum()
        return AttachAuxLoss.apply(weights, objective), load

    def finish(self) -> tuple[dict[str, float], Tensor]:
        """Collective over all ranks of the run.

        Returns:
            ``(sums, loads)``: sums over layers of the terms, times their coefficients; and float64 ``[layers,
            experts + 1]``, the tokens of every expert in the global batch, and the dropped choices.
        """
        dist.all_reduce(self.table)
        aux, z = self.table[:, -2:].sum(0).tolist()
        sums = {AUX: aux, Z: z}
        strengths = self.terms.coefficients
        return {name: sums[name] * strength for name, strength in strengths.items()}, self.table[:, :-2]

    # ---- private

    def _load(self, layer: int, routed: RouterOutput, tokens: RoutedTokens, real: Tensor) -> Tensor:
        """``f``: what share of K / E of the tokens every expert was chosen for, 1 where it is even.

        Empty where no term is made of it.
        """
        if AUX not in self.scales:
            return real.new_empty(0)
        if self.terms.aux_loss == "sequence":
            counts = self._chosen_by_sequence(routed, tokens, real)
            self._add_up(counts, self.sharing)
            size = tokens.lengths[:, None].clamp(min=1)
            return counts * (self.experts / self.top_k) / size
        counts = self._chosen(routed, real)
        if self.terms.aux_loss == "global_batch":
            self._add_up(counts, self.data)
            self.so_far[layer] += counts
            counts = self.so_far[layer].float()
        else:
            self._add_up(counts, self.sharing)
        return counts * self.experts / counts.sum().clamp(min=1)

    def _balance(self, scores: Tensor, tokens: RoutedTokens, real: Tensor, load: Tensor) -> Tensor:
        """The sum of ``load . score`` over real tokens, in ``sequence`` each by the length of its own."""
        if self.terms.aux_loss != "sequence":
            return ((scores * real[:, None]).sum(0) * load).sum()
        own = tokens.sequences.clamp(min=0)
        share = real / tokens.lengths[own].clamp(min=1)
        return ((scores * load[own]).sum(-1) * share).sum()

    def _chosen(self, routed: RouterOutput, real: Tensor) -> Tensor:
        """float32 ``[E]``: real tokens of this rank that chose each expert."""
        counts = real.new_zeros(self.experts)
        return counts.index_add(0, routed.chosen.reshape(-1), real.repeat_interleave(self.top_k))

    def _chosen_by_sequence(self, routed: RouterOutput, tokens: RoutedTokens, real: Tensor) -> Tensor:
        """The same ``[S, E]``, of every sequence."""
        counts = real.new_zeros(len(tokens.lengths) * self.experts)
        place = tokens.sequences.clamp(min=0)[:, None] * self.experts + routed.chosen
        return counts.index_add(0, place.reshape(-1), real.repeat_interleave(self.top_k)).view(
            -1, self.experts
        )

    def _add_up(self, counts: Tensor, group: dist.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            dist.all_reduce(counts, group=group)

    @torch.no_grad()
    def _record(self, layer: int, routed: RouterOutput, real: Tensor, sums: Mapping[str, Tensor]) -> None:
        row = self.table[layer]
        row[: self.experts] += self._chosen(routed, real)
        if routed.dropped is not None:
            row[self.experts] += (routed.dropped * real[:, None]).sum()
        for place, name in ((-2, AUX), (-1, Z)):
            if name in sums:
                row[place] += sums[name].detach()


class AttachAuxLoss(torch.autograd.Function):
    """``values`` unchanged; the backward pass goes on into ``objective`` as if it were part of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, objective: Tensor) -> Tensor:
        ctx.like = objective
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.like)


def normalized(sigmoids: Tensor) -> Tensor:
    """Scores ``[T, E]`` that add up to 1, of which balance losses are made (DeepSeek-V3, equation 19)."""
    return sigmoids / (sigmoids.sum(-1, keepdim=True) + 1e-20)


def bias_change(load: Tensor, rate: float) -> Tensor:
    """What to add to the biases of experts with these loads ``[..., E]`` (Wang et al., 2024, algorithm 1)."""
    return rate * torch.sign(load.mean(-1, keepdim=True) - load).float()


def expert_load_metrics(loads: Tensor, *, drops: bool) -> dict[str, float]:
    """Of ``Routers.finish``: how uneven the layers of experts are, and what share of choices was dropped.

    ``moe/load_max/<layer>`` and ``moe/load_min/<layer>`` are the tokens of the fullest and of the emptiest
    expert over the mean; ``moe/max_violation`` is the largest of all layers' maxima, less 1 (Wang et al.,
    2024, section 4.1). Layers are counted among those with experts.
    """
    tokens, dropped = loads[:, :-1], loads[:, -1]
    even = tokens.mean(-1, keepdim=True).clamp(min=1e-9)
    most, least = (tokens / even).amax(-1).tolist(), (tokens / even).amin(-1).tolist()
    found = {"moe/max_violation": max(most) - 1}
    for layer, (high, low) in enumerate(zip(most, least, strict=True)):
        found |= {f"moe/load_max/{layer}": high, f"moe/load_min/{layer}": low}
    if drops:
        found["moe/dropped"] = float(dropped.sum() / tokens.sum().clamp(min=1))
    return found


class RouterState(ABC):
    """The routers of this rank in one train step after another. Every rank has one."""

    def __init__(self, routers: MoELosses, *, drops: bool) -> None:
        self.routers, self.drops = routers, drops
        self.counts: Mapping[str, int] = {}
        """Global counts of the terms in this step."""
        self.loads: Tensor | None = None
        """Float64 ``[layers, E]`` of the step that was finished last."""

    def begin(self, counts: Mapping[str, int] | None) -> None:
        """``counts``: global, of the loss, its main term first, and of the terms; None: no terms."""
        strengths = self.routers.terms.coefficients
        if counts is None:
            assert not strengths, "terms of routers need their counts at begin_train_step"
            counts = {"": 1}
        self.counts = {name: counts[name] for name in strengths}
        self.routers.begin(self.counts, next(iter(counts.values())))

    def finish(self, loss: float) -> tuple[float, dict[str, float]]:
        """``loss`` with the terms, and metrics; collective over all ranks of the run."""
        sums, loads = self.routers.finish()
        self.loads = loads[:, :-1]
        means = {name: total / max(self.counts[name], 1) for name, total in sums.items()}
        return loss + sum(means.values()), means | expert_load_metrics(loads, drops=self.drops)

    def bias_change(self, layer: int) -> Tensor | None:
        """What a finished step that was not skipped adds to the biases ``[E]`` of a layer's router."""
        assert self.loads is not None, "biases follow the loads of a finished step"
        rate = self.routers.terms.bias_update_rate
        return bias_change(self.loads[layer], rate) if rate else None

    @abstractmethod
    def update_biases(self) -> None:
        """Apply ``bias_change`` to every router of this rank."""

    @abstractmethod
    def abort(self) -> None:
        """Forget the micro-batch under way."""
