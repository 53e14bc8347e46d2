"""``parallelism=single``, ``fsdp2``, ``hsdp``, ``fsdp2_tp2``, ``fsdp2_cp2`` and ``fsdp2_tp2cp2``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel

from components.engines import process_group
from components.engines.fsdp2 import (
    context,
    estimate,
    execution,
    expert_checks,
    layouts,
    tensor_parallel,
)
from components.engines.fsdp2.adapter import check as adapter_check
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.parallelize import blocks
from components.engines.layout import nearest, world_size
from components.models import ModelSpec
from components.optimizers import Optimizer
from runner.errors import ConfigError
from runner.protocols import EngineOptions, ModelSize, RankMemory, StepCost, TrainStep

ActivationCheckpointing = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class FSDP2:
    """``dp`` ranks share a global batch, and every parameter is sharded over them.

    With ``dp_replicate`` copies (hybrid sharding) a parameter is sharded over ``dp / dp_replicate`` ranks.
    """

    computes_prefixes: ClassVar[bool] = True

    dp: int | None
    """Data-parallel ranks; None: WORLD_SIZE, else the visible GPUs, else ``default_dp``."""
    default_dp: int
    """Where it is no multiple of ``dp_replicate``, the next one."""
    reshard_after_forward: bool
    """Free the gathered weights of a block between its forward and its backward."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward computes again: nothing, every block, or attention alone."""
    dp_replicate: int = 1
    """Groups of ranks that hold a copy of every parameter each: gradients alone cross between them."""
    cp: int = 1
    """Ranks that split every row of a batch by position, and shard every parameter too."""
    tp: int = 1
    """Ranks that split every matrix and the vocabulary, and work on the same rows of a batch."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer state live in host memory, and the optimizer runs there."""
    ep: int = 1
    """Neighbours among the ``dp / dp_replicate * cp`` ranks of a copy that have other experts each."""

    def __post_init__(self) -> None:
        for key in ("dp", "default_dp", "dp_replicate", "cp", "tp", "ep"):
            size = getattr(self, key)
            if size is not None and size < 1:
                raise ConfigError(f"parallelism.{key}: must be at least 1, got {size}.")
        if self.dp is not None and self.dp % self.dp_replicate:
            fitting = [size for size in range(1, self.dp + 1) if self.dp % size == 0]
            raise ConfigError(
                f"parallelism.dp_replicate: {self.dp_replicate} does not divide parallelism.dp = {self.dp}; "
                f"use {nearest(self.dp_replicate, fitting)}."
            )

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        return world_size(
            dp=None if self.dp is None else self.dp // self.dp_replicate,
            default_dp=-(-self.default_dp // self.dp_replicate),
            model_ranks=self.dp_replicate * self.cp * self.tp,
            environ=environ,
            num_gpus=num_gpus,
        )

    def data_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""
        return world_size // (self.cp * self.tp)

    def mesh(self, world_size: int) -> dict[str, Any]:
        """Sizes by dimension, and the global rank at every place."""
        return layouts.mesh(self, world_size)

    def cost(
        self,
        size: ModelSize,
        *,
        world_size: int,
        dtype: torch.dtype,
        tokens: float,
        num_microbatches: int,
    ) -> StepCost:
        """What this layout adds to the arithmetic of a step; ``tokens`` are those of one data rank."""
        return layouts.cost(
            self,
            size,
            world_size=world_size,
            dtype=dtype,
            tokens=tokens,
            num_microbatches=num_microbatches,
        )

    def leaner(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Changes of keys, each of which may have a rank hold less."""
        return layouts.leaner(self, world_size)

    def check(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,  # noqa: ARG002  every optimizer and dtype will do
        options: EngineOptions,
        *,
        world_size: int,
    ) -> None:
        """
        Raises:
            ConfigError: the model has no blocks that could be sharded, no plan for ``tp`` parts, or no way to
                share its rows among ``cp`` ranks or its experts among ``ep``; nothing here compiles or fuses
                its blocks; or ``tp`` ranks cannot split the adapter.
        """
        blocks(model)
        ranks = world_size // (self.dp_replicate * self.tp)
        tensor_parallel.check(model, self.tp, ranks)
        expert_checks.check(model, ep=self.ep, tp=self.tp, ranks=ranks, adapter=options.adapter)
        context.check(model, self.cp, self.tp)
        adapter_check(options.adapter, self.tp)
        execution.check(model, options.device, compiled=options.compiled, kernels=options.kernels)

    def memory(self, model: PreTrainedModel, optimizer: Optimizer, step: TrainStep) -> list[RankMemory]:
        """What a rank of every pipeline stage will need at the peak of a train step."""
        return estimate.memory(self, model, optimizer, step)

    def build(self, model: ModelSpec, optimizer: Optimizer, options: EngineOptions) -> FSDP2Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
        with process_group.joined(options.device, options.timeout_s) as device:
            return FSDP2Engine(model, optimizer, self, options, device)
