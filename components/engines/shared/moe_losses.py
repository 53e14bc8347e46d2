"""Load balancing loss, router z-loss and load statistics of MoE routers, for both engines.

Each MoE layer calls ``MoELosses.attach`` once in its forward pass. The terms are sums over real tokens; their
gradients enter through the weights of the chosen experts, scaled such that they become gradients of means
when the engine divides all gradients by the main count. The host does not wait for the device before the step
ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.models.moe_loss_config import AUX, MoELossConfig, Z


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of one micro-batch that the routers of this rank process, in order."""

    sequences: Tensor
    """int64 ``[T]`` on the device: the sequence of each token in the micro-batch, -1 for padding."""
    lengths: Tensor
    """``[S]`` on the device: number of real tokens of each sequence, counted over all ranks that share it."""


@dataclass(frozen=True)
class RouterOutput:
    """The output of the router of one layer for ``T`` tokens."""

    logits: Tensor
    """``[T, E]``"""
    scores: Tensor
    """float32 ``[T, E]``, differentiable: probabilities over all experts."""
    chosen: Tensor
    """int64 ``[T, K]``: indices of the chosen experts."""
    dropped: Tensor | None = None
    """bool ``[T, K]``: choices dropped by the capacity factor. None means that none are dropped."""


class MoELosses:
    """The losses and load counts of the routers of one rank.

    ``layers`` is the number of MoE layers of the whole model, of which each rank has some. ``sharing`` is the
    group of the ranks with other tokens of the same micro-batches, and ``data`` the group of the ranks with
    other tokens of the same global batch, which includes the ranks of ``sharing``. None means that no other
    rank has such tokens; without the global_batch loss, ``data`` is not used. ``counted`` is False if another
    rank has the same tokens in the same layers and counts them.
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
        """For each layer: tokens per expert, number of dropped choices, and the sums of the two terms."""
        self.so_far = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        """Tokens per expert in the global batch so far, over all data ranks, for the layers of this rank."""
        self.scales: Mapping[str, float] = {}

    def begin(self, counts: Mapping[str, int], n_main: float) -> None:
        """Begin a train step with the global ``counts`` of the terms.

        ``n_main`` is the number by which the engine divides all gradients.
        """
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
        """Attach the terms of one layer to ``weights`` (any shape) of the chosen experts.

        The gradients of the terms enter the backward pass through the returned weights. If there is a load
        balancing loss and ``recomputed`` is None, the call is collective over ``sharing``, or over ``data``
        with ``aux_loss=global_batch``.

        Args:
            layer: index among the MoE layers of the whole model.
            recomputed: the load that the first pass over these tokens returned, if activation checkpointing
                computes the layer again; nothing is counted a second time.

        Returns:
            the weights, and the load (``f`` in ``MoELossConfig``, ``[E]`` or ``[S, E]``) used by the load
            balancing loss.
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
        """Reduce the counts and sums of the step; collective over all ranks of the run.

        Returns:
            ``(sums, loads)``: sums over layers of the terms, times their coefficients; and float64 ``[layers,
            experts + 1]``, the tokens of every expert in the global batch and the number of dropped choices.
        """
        dist.all_reduce(self.table)
        aux, z = self.table[:, -2:].sum(0).tolist()
        sums = {AUX: aux, Z: z}
        strengths = self.terms.coefficients
        return {name: sums[name] * strength for name, strength in strengths.items()}, self.table[:, :-2]

    # ---- private

    def _load(self, layer: int, routed: RouterOutput, tokens: RoutedTokens, real: Tensor) -> Tensor:
        """Return ``f``, the tokens of each expert relative to an even load of K / E of all tokens.

        It is 1 if the load is even, and the tensor is empty if there is no load balancing loss.
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
        """Return the sum over real tokens of the dot product of ``load`` and score.

        If ``aux_loss`` is ``sequence``, a token's product is with the load of its own sequence, and is
        divided by the length of the sequence.
        """
        if self.terms.aux_loss != "sequence":
            return ((scores * real[:, None]).sum(0) * load).sum()
        own = tokens.sequences.clamp(min=0)
        share = real / tokens.lengths[own].clamp(min=1)
        return ((scores * load[own]).sum(-1) * share).sum()

    def _chosen(self, routed: RouterOutput, real: Tensor) -> Tensor:
        """Count the real tokens of this rank that chose each expert: float32 ``[E]``."""
        counts = real.new_zeros(self.experts)
        return counts.index_add(0, routed.chosen.reshape(-1), real.repeat_interleave(self.top_k))

    def _chosen_by_sequence(self, routed: RouterOutput, tokens: RoutedTokens, real: Tensor) -> Tensor:
        """Count the real tokens of this rank that chose each expert, per sequence: float32 ``[S, E]``."""
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
    """Identity on ``values`` whose backward pass treats ``objective`` as a part of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, objective: Tensor) -> Tensor:
        ctx.like = objective
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.like)


def normalized(sigmoids: Tensor) -> Tensor:
    """Normalize scores ``[T, E]`` to sum to 1, for the load balancing loss (DeepSeek-V3, equation 19)."""
    return sigmoids / (sigmoids.sum(-1, keepdim=True) + 1e-20)


def bias_change(load: Tensor, rate: float) -> Tensor:
    """Return the update of router biases for loads ``[..., E]`` (Wang et al., 2024, algorithm 1)."""
    return rate * torch.sign(load.mean(-1, keepdim=True) - load).float()


def expert_load_metrics(loads: Tensor, *, drops: bool) -> dict[str, float]:
    """Return metrics of the load imbalance and of dropped choices from the loads of ``MoELosses.finish``.

    ``moe/load_max/<layer>`` and ``moe/load_min/<layer>`` are the tokens of the most and of the least loaded
    expert, divided by the mean. ``moe/max_violation`` is the maximum of ``moe/load_max`` over layers, minus 1
    (Wang et al., 2024, section 4.1). ``moe/dropped`` is the fraction of dropped choices. Layer numbers count
    only MoE layers.
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
    """The losses, loads and bias updates of this rank's routers in the train steps of an engine.

    Every rank has an instance, even without an MoE layer, because ``finish`` is collective.
    """

    def __init__(self, routers: MoELosses, *, drops: bool) -> None:
        self.routers, self.drops = routers, drops
        self.counts: Mapping[str, int] = {}
        """Global counts of the router terms in this step."""
        self.loads: Tensor | None = None
        """Tokens per expert in the last finished step: float64 ``[layers, E]``."""

    def begin(self, counts: Mapping[str, int] | None, factor: float = 1.0) -> None:
        """Begin a train step with the global counts of all loss terms, the main term first.

        ``counts`` may be None only if the routers add no terms. The engine multiplies the loss by ``factor``
        in the backward pass.
        """
        strengths = self.routers.terms.coefficients
        if counts is None:
            assert not strengths, "terms of routers need their counts at begin_train_step"
            counts = {"": 1}
        self.counts = {name: counts[name] for name in strengths}
        self.routers.begin(self.counts, factor * next(iter(counts.values())))

    def finish(self, loss: float) -> tuple[float, dict[str, float]]:
        """Return ``loss`` plus the router terms, and metrics; collective over all ranks of the run."""
        sums, loads = self.routers.finish()
        self.loads = loads[:, :-1]
        means = {name: total / max(self.counts[name], 1) for name, total in sums.items()}
        return loss + sum(means.values()), means | expert_load_metrics(loads, drops=self.drops)

    def bias_change(self, layer: int) -> Tensor | None:
        """Return the update of a layer's router biases ``[E]`` after a step that was not skipped.

        None means that biases are not updated, because their update rate is 0.
        """
        assert self.loads is not None, "biases follow the loads of a finished step"
        rate = self.routers.terms.bias_update_rate
        return bias_change(self.loads[layer], rate) if rate else None

    @abstractmethod
    def update_biases(self) -> None:
        """Apply ``bias_change`` to every router of this rank."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the state of the current micro-batch."""
