"""An optimizer for updates that need full (unsharded) weights, such as the orthogonalisation of a matrix.

Every weight has an owner among the ranks that share it. In a step, its gradient is gathered on the owner, the
owner updates the weight with the optimizer's own class, and every rank receives its part of the result. So
work and state are distributed over the ranks by weight; the state of a weight is never sharded.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.engines.shared.class_state import (
    UPDATES,
    as_float64,
    create_state,
    group_numbers,
    set_group_numbers,
    set_number,
    stateless,
    without_constants,
)
from components.optimizers import Optimizer, StateKinds, TorchClass, kind_of_state, torch_optimizer


class OwnedWeight(ABC):
    """A weight that its owner updates unsharded; the methods are collective over the ranks that share it."""

    has_gradient: bool = True
    writes: bool = True
    """Whether this rank, if it is the owner, writes the state to checkpoints."""
    owner: int
    """Index of the owner among the ranks that share the weight, set by ``WholeWeightOptimizer``."""

    def __init__(
        self, name: str, shape: torch.Size, device: torch.device, *, place: int, sharers: int
    ) -> None:
        self.name, self.shape = name, shape
        self.place, self.sharers = place, sharers
        self.parameter = nn.Parameter(torch.empty((0,) * len(shape), device=device))
        """The full weight in fp32 on the owner, at least during the update; otherwise an empty tensor."""

    @property
    def is_mine(self) -> bool:
        return self.place == self.owner

    @abstractmethod
    def gather(self) -> None:
        """Set the gradient of ``parameter`` on the owner, and its value if the owner does not keep it."""

    @abstractmethod
    def distribute(self) -> None:
        """Copy the updated value of the owner into the shards of all ranks that share the weight."""


class WholeWeightOptimizer:
    """A torch optimizer over the full weights that this rank owns.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, description: Optimizer, weights: Sequence[OwnedWeight]) -> None:
        self.weights = weights
        for weight, owner in zip(weights, owners((w.sharers, w.shape.numel()) for w in weights), strict=True):
            weight.owner = owner
        self.owned = [weight for weight in weights if weight.is_mine]
        of_class = description if isinstance(description, TorchClass) else None
        with whole_shapes(self.owned if of_class else ()):  # some classes create state in their constructor
            named = [(weight.name, weight.parameter) for weight in self.owned]
            self.optimizer = torch_optimizer(description, named) if named else None
        self.kinds = of_class.state if of_class else StateKinds()
        self.shared = of_class.state.scalars if of_class and of_class.scope == "element" else ()
        """Names of scalar states that are equal for all weights. A checkpoint contains each of them once."""
        self.updates = 0

    def step(self, lr: float) -> None:
        """Update every weight that has a gradient, in place."""
        updated = [weight for weight in self.weights if weight.has_gradient]
        for weight in updated:
            weight.gather()
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        for weight in updated:
            weight.distribute()
        self.updates += 1

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """Yield False, which means that no weight changed for the evaluation.

        Optimizers with separate weights for evaluation never use this class.
        """
        yield False

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that this rank writes, by checkpoint key."""
        with self.allocated_state():
            return self._state((weight for weight in self.owned if weight.writes), self.shared)

    @contextmanager
    def allocated_state(self) -> Iterator[None]:
        """Have the state of all owned weights within the context; drop on exit what was created for it."""
        created = self._create()
        try:
            yield
        finally:
            for weight in created:
                self._of(weight).pop(weight.parameter, None)  # a class may keep no state

    @contextmanager
    def loading(self, saved: Mapping[str, torch.Size]) -> Iterator[dict[str, Tensor]]:
        """Yield tensors that the caller fills from a checkpoint, and at the end set the state from them.

        ``saved`` are the sizes of the checkpoint's tensors, by key.
        """
        self._create()
        # It has numbers only once if an earlier version took the updates of the class for elementwise.
        shared = [kind for kind in self.kinds.scalars if f"optimizer_state/{kind}" in saved]
        self._resize(saved, shared)
        tensors = self._state(self.owned, shared)
        yield without_constants(tensors, self.kinds, saved)
        self.updates = int(tensors[UPDATES].item())
        if self.optimizer is not None:
            set_group_numbers(self.optimizer, self.kinds.group_scalars, tensors)
        for weight in self.owned:
            state = self._of(weight)[weight.parameter]
            for kind, value in state.items():
                if kind in shared or isinstance(value, int | float):
                    set_number(state, kind, tensors[state_key(kind, weight, shared)])
            if not self.updates:  # saved before the first update, which creates the state
                self._of(weight).pop(weight.parameter, None)

    def _state(self, weights: Iterable[OwnedWeight], shared: Container[str]) -> dict[str, Tensor]:
        tensors = {UPDATES: as_float64(self.updates)}
        if self.optimizer is not None:
            tensors |= group_numbers(self.optimizer, self.kinds.group_scalars)
        for weight in weights:
            for kind, value in self._of(weight)[weight.parameter].items():
                if kind_of_state(weight.shape, value) == "moment":
                    tensors[f"{kind}/{weight.name}"] = value
                elif isinstance(value, Tensor) and kind not in shared:
                    tensors[state_key(kind, weight, shared)] = value
                elif value is not None:
                    tensors[state_key(kind, weight, shared)] = as_float64(value)
        return tensors

    def _resize(self, saved: Mapping[str, torch.Size], shared: Container[str]) -> None:
        """Let state be one number if it is saved so, as Prodigy's is for weights that began with zeros."""
        for weight in self.owned:
            state = self._of(weight)[weight.parameter]
            for kind, value in state.items():
                size = None if kind in shared else saved.get(state_key(kind, weight, shared))
                if isinstance(value, Tensor) and size is not None and size.numel() == 1:
                    state[kind] = value.new_empty(size)

    def _create(self) -> list[OwnedWeight]:
        """Create the missing states, one after the other, by updates with zero gradients.

        Return the weights whose state is new. The values of the weights do not change.
        """
        if self.optimizer is None:
            return []
        weights = {weight.parameter: weight for weight in self.owned}
        new = stateless(self.optimizer)
        for group, parameter in new:
            with whole_shapes([weights[parameter]]):
                create_state(self.optimizer, group, parameter)
        return [weights[parameter] for _, parameter in new]

    def _of(self, weight: OwnedWeight) -> dict[Tensor, dict[str, Any]]:
        assert self.optimizer is not None, f"{weight.name} is owned without an optimizer"
        return self.optimizer.state


def state_key(kind: str, weight: OwnedWeight, shared: Container[str]) -> str:
    """Return the checkpoint key of state other than moments; ``shared`` are the kinds that are saved once."""
    return f"optimizer_state/{kind}" + f"/{weight.name}" * (kind not in shared)


@contextmanager
def whole_shapes(weights: Sequence[OwnedWeight]) -> Iterator[None]:
    """Give each weight's ``parameter`` ones of the full shape, and on exit its previous data again.

    With zeros, some classes keep less state, such as Prodigy, whose distance from them is the weight itself.
    """
    kept = [weight.parameter.data for weight in weights]
    for weight in weights:
        weight.parameter.data = torch.ones(weight.shape, device=weight.parameter.device)
    try:
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.parameter.data = before


def owners(weights: Iterable[tuple[int, int]]) -> list[int]:
    """Assign each weight, the largest first, to the rank with the fewest elements among those that share it.

    Args:
        weights: for each weight, the number of ranks that share it and the number of its elements.

    Returns:
        For each weight, the index of its owner among the ranks that share it, the same on all of them.
    """
    each = list(weights)
    loads: dict[int, list[int]] = {}
    found = [0] * len(each)
    for place in sorted(range(len(each)), key=lambda place: -each[place][1]):
        sharers, numel = each[place]
        load = loads.setdefault(sharers, [0] * sharers)
        found[place] = load.index(min(load))
        load[found[place]] += numel
    return found
