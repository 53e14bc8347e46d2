"""Rank functions of the parity runs."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.parity.parity_rows import Fault
from components.contracts.device import DeviceKind
from components.contracts.engine import Engine
from components.models import nf4
from components.optimizers import Muon, muon_in_float32
from runner.config.instantiate import Experiment
from runner.training import rank
from tests.distributed.gradients import capture


def train(folder: Path, fault: Fault | None) -> dict[str, Tensor]:
    """Train the run that was prepared in ``folder``, and return the gradients of the first step.

    They are unsharded and clipped, by Hugging Face name, on rank 0. Other ranks return {}. There is no output
    on the terminal.
    """
    found: list[dict[str, Tensor]] = []
    build = rank.build_engine

    def build_watched(experiment: Experiment, device: DeviceKind, **options: Any) -> Engine:
        engine = build(experiment, device, **options)
        found.append(capture(engine, first_only=True))
        return engine

    with (
        silence(),
        broken(fault),
        muon_in_float32(),
        mock.patch.object(rank, "build_engine", build_watched),
    ):
        rank.run_rank(folder)
    (gradients,) = found
    return gradients if os.environ["RANK"] == "0" else {}


@contextmanager
def silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


@contextmanager
def broken(fault: Fault | None) -> Iterator[None]:
    """Inject a fault into Megatron or our code while the context is open. None means no fault."""
    if fault is None:
        yield
    else:
        with FAULTS[fault]():
            yield


@contextmanager
def norms_not_summed() -> Iterator[None]:
    """Skip the sum over tp ranks of the gradients of norm weights.

    The gradients of a rank cover only its own positions.
    """
    import components.engines.megatron.runtime.engine  # noqa: F401  patches megatron before it is used

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]  # a function has the same name
    with mock.patch.object(module, "_allreduce_non_tensor_model_parallel_grads"):
        yield


@contextmanager
def own_count() -> Iterator[None]:
    """Let each data-parallel rank use dp times its own label count as the count of all ranks."""
    from components.engines.megatron.runtime.engine import MegatronEngine

    def own_times_dp(self: Any, values: Sequence[float]) -> list[float]:
        return [value * self.dp_size for value in values]

    with mock.patch.object(MegatronEngine, "sum_over_data", own_times_dp):
        yield


@contextmanager
def own_load() -> Iterator[None]:
    """Let each rank compute the load balancing loss from only its own part of a micro-batch."""
    from components.engines.shared.moe_losses import MoELosses

    with mock.patch.object(MoELosses, "_add_up"):
        yield


@contextmanager
def own_shard() -> Iterator[None]:
    """Let each rank orthogonalise its own shard of a matrix."""
    with mock.patch.object(Muon, "scope", "element"):
        yield


@contextmanager
def own_part() -> Iterator[None]:
    """Let each tensor-parallel rank orthogonalise its own part of a matrix, as if it were the full matrix."""
    from components.engines.megatron.runtime import whole_weights

    def alone(self: Any, *args: Any, **options: Any) -> None:
        initialise(self, *args, **options)
        shape = torch.Size([part.stop - part.start for part in self.member.index])
        whole = tuple(slice(0, size) for size in shape)
        self.member = replace(self.member, shape=shape, index=whole, dim=None)
        self.shape, self.mesh = shape, SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)
        self.place, self.sharers = 0, 1

    initialise = whole_weights.MegatronWeight.__init__
    with mock.patch.object(whole_weights.MegatronWeight, "__init__", alone):
        yield


@contextmanager
def own_values() -> Iterator[None]:
    """Let each rank multiply weights by a different factor before it quantises them."""
    quantize, factor = nf4.quantize, 1 + int(os.environ["RANK"]) / 100

    with mock.patch.object(nf4, "quantize", lambda matrix: quantize(matrix * factor)):
        yield


FAULTS: Mapping[Fault, Callable[[], Any]] = {
    "norms_not_summed": norms_not_summed,
    "own_count": own_count,
    "own_load": own_load,
    "own_shard": own_shard,
    "own_part": own_part,
    "own_values": own_values,
}
