"""An optimizer with elementwise updates over the shards of this rank."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.engines.fsdp2.mesh import local_shard, placed_like
from components.engines.fsdp2.param_views import ParamView
from components.engines.shared.class_state import (
    UPDATES,
    ClassState,
    create_state,
    stateless,
    without_constants,
)
from components.optimizers import Optimizer, StateKinds, TorchClass, make_moments, torch_optimizer

STEP = "step"
"""Key under which torch's AdamW counts the updates of a parameter."""


class ShardedOptimizer:
    """A torch optimizer over the local tensors of the trained weights.

    Its updates are per element, so they need no communication. Local tensors are faster than DTensors, for
    which torch would first derive the placement of every result: half a second in the first step of a small
    model.
    """

    def __init__(
        self, description: Optimizer, weights: Mapping[str, nn.Parameter], views: Sequence[ParamView]
    ) -> None:
        self.moments, self.weights, self.views = description.moments, list(weights.values()), views
        shards = {weight: nn.Parameter(local_shard(weight.detach())) for weight in self.weights}
        # Some kernels refuse empty shards. A rank with no others keeps them: an optimizer needs parameters.
        self.shards = {weight: shard for weight, shard in shards.items() if shard.numel()} or shards
        # The first of a parameter's names on disk is enough: stacked experts have the same options.
        on_disk = {view.parameter: view.name for view in reversed(views)}
        named = ((on_disk[weight], shard) for weight, shard in self.shards.items())
        self.optimizer = torch_optimizer(description, named)
        self.of_class = (
            ClassState(self.optimizer, description) if isinstance(description, TorchClass) else None
        )

    def step(self, lr: float) -> None:
        """Update every weight that has a gradient, in place."""
        self._follow()
        for weight, shard in self.shards.items():
            shard.grad = None if weight.grad is None else local_shard(weight.grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # drops only this reference to the gradients
        if self.of_class is not None:
            self.of_class.updates += 1

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """Set the weights to the optimizer's values for evaluation, such as an average, within the context.

        Yield whether the weights changed. At the end they are restored from a copy, because the optimizer's
        own conversion back would round them.
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

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state that this rank saves, by checkpoint key.

        It consists of this rank's shards of the moments, which share the optimizer's memory, and of copies of
        the scalars, such as the number of updates, each of shape ``(1,)``.
        """
        with self.allocated_state():
            return self._moments() | self._numbers()

    @contextmanager
    def allocated_state(self) -> Iterator[None]:
        """Have the state of all weights within the context; drop on exit what only an update can create."""
        created = self._create()
        try:
            yield
        finally:
            for shard in created:
                self.optimizer.state.pop(shard, None)  # a class may keep no state

    @contextmanager
    def loading(self, saved: Container[str]) -> Iterator[dict[str, Tensor]]:
        """Yield tensors that the caller fills from a checkpoint, and at the end set the scalars from them.

        ``saved`` are the keys of the checkpoint.
        """
        self._create()
        numbers = self._numbers()
        kinds = self.of_class.kinds if self.of_class else StateKinds()
        yield self._moments() | without_constants(numbers, kinds, saved)
        if self.of_class is not None:
            self.of_class.set_numbers(numbers)
            return
        for state in self.optimizer.state.values():
            if STEP in state:
                state[STEP].fill_(numbers[UPDATES].item())

    def moment(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return a moment of ``weight`` with the weight's placement, in the memory of the optimizer."""
        if weight not in self.shards:
            return placed_like(local_shard(weight.detach()), weight)  # empty
        return placed_like(self.optimizer.state[self.shards[weight]][name], weight)

    def _moments(self) -> dict[str, Tensor]:
        views = [(kind, view) for view in self.views for kind in self.moments]
        return {f"{kind}/{v.name}": v.slices(self.moment(kind, v.parameter)) for kind, v in views}

    def _numbers(self) -> dict[str, Tensor]:
        """Return copies of the scalars of the state, by checkpoint key.

        For an optimizer that is not a ``TorchClass``, the only one is the number of updates.
        """
        if self.of_class is not None:
            return self.of_class.numbers()
        counts = [state[STEP] for state in self.optimizer.state.values() if STEP in state]
        return {UPDATES: counts[0].detach().cpu().reshape(1) if counts else torch.zeros(1)}

    def _create(self) -> list[nn.Parameter]:
        """Create the state of weights that have not been updated yet.

        Returns:
            The shards whose new state differs from that of an optimizer before its first update.
        """
        if self.of_class is None:
            make_moments(self.optimizer, self.moments)
            return []
        self._follow()
        new = stateless(self.optimizer)
        for group, shard in new:
            create_state(self.optimizer, group, shard)
        return [shard for _, shard in new]

    def _follow(self) -> None:
        for weight, shard in self.shards.items():
            shard.data = local_shard(weight.detach())  # FSDP may have moved it to pinned memory
