"""The optimizer of the shards that this rank has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.engines.fsdp2.class_state import UPDATES, ClassState
from components.engines.fsdp2.mesh import local_shard, placed_like
from components.optimizers import Optimizer, TorchClass, make_moments, torch_optimizer

STEP = "step"
"""Key under which torch's AdamW counts the updates of a parameter."""


class ShardedOptimizer:
    """A torch optimizer over the local tensors of the trained weights.

    Its updates are per element, so the shards of a weight need no other rank; other classes get layouts
    without shards. Given DTensors, torch would first derive the placement of every result, which takes half
    a second in the first step of a small model.
    """

    def __init__(self, description: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        self.moments, self.weights = description.moments, list(weights.values())
        self.shards = {weight: nn.Parameter(local_shard(weight.detach())) for weight in self.weights}
        named = {name: self.shards[weight] for name, weight in weights.items()}
        self.optimizer = torch_optimizer(description, named.items())
        self.of_class = None
        if isinstance(description, TorchClass):
            self.of_class = ClassState(self.optimizer, description, named)

    def step(self, lr: float) -> None:
        """Update the weights in place from their gradients; weights without one are left as they are."""
        self._follow()
        for weight, shard in self.shards.items():
            shard.grad = None if weight.grad is None else local_shard(weight.grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # only this reference to them
        if self.of_class is not None:
            self.of_class.updates += 1

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """Give the weights the values that the optimizer trains for, such as an average, inside the context.

        Yields whether they changed. They are restored from a copy: the way back of such an optimizer rounds.
        """
        if not hasattr(self.optimizer, "eval"):
            yield False
            return
        self._follow()
        kept = [shard.detach().clone() for shard in self.shards.values()]
        self.optimizer.eval()
        try:
            yield True
        finally:
            self._follow()
            self.optimizer.train()  # type: ignore[attr-defined]
            for shard, before in zip(self.shards.values(), kept, strict=True):
                shard.data.copy_(before)

    def make_moments(self) -> list[nn.Parameter]:
        """Create the state of weights that have not been updated yet: zero moments, or that of the class.

        Returns:
            The shards whose state differs from that of their first update: those of another class than ours.
        """
        if self.of_class is not None:
            self._follow()
            return self.of_class.create()
        make_moments(self.optimizer, self.moments)
        return []

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Give every weight its state inside the context; tensors that are taken from it stay valid."""
        created = self.make_moments()
        yield
        for shard in created:
            del self.optimizer.state[shard]

    def moment(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return a moment of ``weight``, placed as the weight is, which shares the optimizer's memory."""
        return placed_like(self.optimizer.state[self.shards[weight]][name], weight)

    def counters(self) -> dict[str, Tensor]:
        """Return copies of the numbers of the optimizer, of shape (1,), by their keys in checkpoints."""
        if self.of_class is not None:
            return self.of_class.numbers()
        counts = [state[STEP] for state in self.optimizer.state.values() if STEP in state]
        return {UPDATES: counts[0].detach().cpu().reshape(1) if counts else torch.zeros(1)}

    def set_counters(self, counters: Mapping[str, Tensor]) -> None:
        """Set the numbers of the optimizer, for every weight."""
        if self.of_class is not None:
            self.of_class.set_numbers(counters)
            return
        for state in self.optimizer.state.values():
            if STEP in state:
                state[STEP].fill_(counters[UPDATES].item())

    def whole(self) -> dict[str, Tensor]:
        """Return the state that does not have the shape of its weight, by its keys in checkpoints."""
        return {} if self.of_class is None else self.of_class.whole()

    def _follow(self) -> None:
        for weight, shard in self.shards.items():
            shard.data = local_shard(weight.detach())  # FSDP may have moved it to pinned memory
