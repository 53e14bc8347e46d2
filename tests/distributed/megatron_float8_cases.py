"""Rank function of test_megatron_float8.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from components.engines.megatron import Megatron
from tests.distributed.cases import Step
from tests.distributed.megatron_cases import engine_step


def recorded_step(on: Megatron, layout: str, micro_batch: int) -> tuple[Step, list[int], set[int]]:
    """Return a step, the layers in Megatron's float8 context in order, and the lengths of their input.

    A stand-in for the context records what is computed in it. The products stay in fp32.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    current: list[int] = []
    layers: list[int] = []
    lengths: set[int] = set()
    forward = TransformerLayer.forward

    @contextmanager
    def context(_: object, number: int, **_other: object) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    def recorded(layer: TransformerLayer, *, hidden_states: Tensor, **others: Any) -> Any:
        layers.extend(current)
        lengths.add(len(hidden_states))
        return forward(layer, hidden_states=hidden_states, **others)

    with (
        patch("megatron.core.transformer.transformer_block.get_fp8_context", context),
        patch.object(TransformerLayer, "forward", recorded),
    ):
        found = engine_step(on, "qwen3", layout, micro_batch, float8=True)
    return found, layers, lengths
