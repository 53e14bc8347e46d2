"""``parallelism=single``, ``fsdp2``, ``hsdp``, ``fsdp2_tp2``, ``fsdp2_cp2`` and ``fsdp2_tp2cp2``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines import process_group
from components.engines.fsdp2 import context, execution, expert_checks, tensor_parallel
from components.engines.fsdp2.adapter import check as adapter_check
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.parallelize import blocks
from components.engines.layout import nearest, world_size
from components.models import ModelSpec
from components.optimizers import Optimizer
from runner.errors import ConfigError
from runner.protocols import Kernels, Reference


@dataclass(frozen=True)
class FSDP2(FSDP2Layout):
    """Sharded data, tensor, context and expert parallelism over any transformers causal language model."""

    computes_prefixes: ClassVar[bool] = True

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

    def check(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,  # noqa: ARG002  every optimizer and dtype will do
        *,
        world_size: int,
        dtype: torch.dtype,  # noqa: ARG002
        device: Literal["cpu", "cuda"],
        compiled: bool = False,
        kernels: Kernels = "auto",
        adapter: LoRA | None = None,
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
        expert_checks.check(model, ep=self.ep, tp=self.tp, ranks=ranks, adapter=adapter)
        context.check(model, self.cp, self.tp)
        adapter_check(adapter, self.tp)
        execution.check(model, device, compiled=compiled, kernels=kernels)

    def build(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        *,
        seed: int,
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
        reference: Reference,
        count_zeros: bool,
        timeout_s: float = 0,
        compiled: bool = False,
        kernels: Kernels = "auto",
        reference_model: ModelSpec | None = None,
        adapter: LoRA | None = None,
    ) -> FSDP2Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
        local = process_group.join(device)
        try:
            engine = FSDP2Engine(
                model,
                optimizer,
                self,
                seed=seed,
                dtype=dtype,
                device=local,
                reference=reference,
                reference_model=reference_model,
                count_zeros=count_zeros,
                compiled=compiled,
                kernels=kernels,
                adapter=adapter,
            )
            process_group.outlast(timeout_s)
        except BaseException:
            process_group.leave_alone()
            raise
        return engine
