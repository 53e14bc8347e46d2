"""``parallelism=megatron`` and its named sizes (``tp2``, ``pp2vpp2``, ``tp2cp2``, ...)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from transformers import PreTrainedModel

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.megatron import float8
from components.engines.megatron.checks import check_keys, check_run
from components.engines.megatron.layout import Layout
from components.engines.shared import process_group
from components.engines.shared.half_matmul import avoid_slow_products
from components.engines.shared.parallel_dims import world_size
from components.models import ModelSpec
from components.optimizers import Optimizer

if TYPE_CHECKING:
    from components.engines.megatron.runtime.engine import MegatronEngine


@dataclass(frozen=True)
class Megatron(Layout):
    """Tensor, pipeline, context and data parallelism by Megatron-Core, on GPUs or on gloo ranks of a CPU."""

    # mcore's packed rotary embedding derives positions from cu_seqlens, so every sequence starts at 0.
    computes_prefixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_keys(self)

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        return world_size(
            dp=self.dp,
            default_dp=self.default_dp,
            model_ranks=self.model_ranks,
            environ=environ,
            num_gpus=num_gpus,
        )

    def dp_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks, over which a global batch is split."""
        return world_size // self.model_ranks

    def check(
        self, model: PreTrainedModel, optimizer: Optimizer, options: EngineOptions, *, world_size: int
    ) -> None:
        """Check that the engine can compute this run correctly.

        Raises:
            ConfigError: if Megatron or its engine here does not support the run or would compute it wrongly.
        """
        if options.compiled:
            raise ConfigError(
                "run.compile: Megatron does not compile its blocks; use parallelism=fsdp2 or "
                "parallelism=single, or run.compile=false."
            )
        if options.kernels != "auto":
            raise ConfigError(
                f"run.kernels: is {options.kernels}, but selects kernels on FSDP2 only; use auto, "
                "and parallelism.transformer_impl=local for layers without transformer-engine."
            )
        check_run(self, model, optimizer, options, world_size=world_size)
        if options.float8:
            float8.check(self, model, options)
        if self.transformer_config:  # else the parent process imports no megatron
            from components.engines.megatron.runtime.transformer_config import transformer_config

            transformer_config(model.config, self, options)

    def build(self, model: ModelSpec, optimizer: Optimizer, options: EngineOptions) -> "MegatronEngine":
        """Join the process group and build this rank's engine; every rank must call it."""
        if self.tp > 1 and options.device == "cuda" and not torch.cuda.is_initialized():
            # With one queue, which CUDA makes when it starts, the communication of tensor parallelism begins
            # before the matmul that it overlaps with.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        from components.engines.megatron.runtime.engine import MegatronEngine

        avoid_slow_products(options.device, options.dtype)
        with process_group.joined(options.device, options.timeout_s) as device:
            return MegatronEngine(model, optimizer, self, options, device)
