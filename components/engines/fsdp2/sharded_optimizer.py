"""The optimizer of the shards that this rank has."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from components.engines.fsdp2.mesh import local_shard, placed_like
from components.optimizers import Optimizer, make_moments, torch_optimizer

STEP = "step"
"""Key under which torch's AdamW counts the updates of a parameter."""


class ShardedOptimizer:
    """A torch optimizer over the local tensors of the trained weights.

    Its updates are per element, so the shards of a weight need no other rank. Given DTensors, torch would
    first derive the placement of every result, which takes half a second in the first step of a small model.
    """

    def __init__(self, description: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        self.moments, self.weights = description.moments, list(weights.values())
        self.shards = {weight: nn.Parameter(local_shard(weight.detach())) for weight in self.weights}
        named = ((name, self.shards[weight]) for name, weight in weights.items())
        self.optimizer = torch_optimizer(description, named)

    def step(self, lr: float) -> None:
        """Update the weights in place from their gradients; weights without one are left as they are."""
        for weight, shard in self.shards.items():
            shard.data = local_shard(weight.detach())  # FSDP may have moved it to pinned memory
            shard.grad = None if weight.grad is None else local_shard(weight.grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # only this reference to them

    def make_moments(self) -> None:
        """Create zero moments for weights that have not been updated yet."""
        make_moments(self.optimizer, self.moments)

    def moment(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return a moment of ``weight``, placed as the weight is, which shares the optimizer's memory."""
        return placed_like(self.optimizer.state[self.shards[weight]][name], weight)

    def steps(self) -> Tensor:
        """Return the number of updates for AdamW's bias correction, of shape (1,); 0 for other optimizers."""
        counts = [state[STEP] for state in self.optimizer.state.values() if STEP in state]
        return counts[0].detach().cpu().reshape(1) if counts else torch.zeros(1)

    def set_steps(self, count: float) -> None:
        """Set the number of updates of every weight."""
        for state in self.optimizer.state.values():
            if STEP in state:
                state[STEP].fill_(count)
