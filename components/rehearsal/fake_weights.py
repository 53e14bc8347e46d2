"""Initial weights of a rehearsal: fake tensors, so no weights are read from files or drawn at random."""

from dataclasses import fields
from typing import Self

import torch
from torch import Tensor

from components.contracts.configs import WeightSource
from components.models import ModelSpec
from components.models.weights import named_shapes
from components.rehearsal.mode import RehearsalMode


class FakeWeightsModel(ModelSpec):
    """A model whose weights are fake tensors in host memory; only its configuration is read."""

    mode: RehearsalMode

    @classmethod
    def of(cls, model: ModelSpec, mode: RehearsalMode) -> Self:
        made = cls(**{field.name: getattr(model, field.name) for field in fields(model)})
        object.__setattr__(made, "mode", mode)
        return made

    def weights(self, seed: int) -> WeightSource:  # noqa: ARG002  nothing is drawn
        # Buffers such as router biases are read by name, too.
        shapes = named_shapes(self.meta_model) | {n: b.shape for n, b in self.meta_model.named_buffers()}

        def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            sizes = list(shapes[name])
            for dim, part in enumerate(index):
                sizes[dim] = len(range(*part.indices(sizes[dim])))
            with self.mode.fake:
                return torch.empty(sizes)

        return read
