"""The check of an FSDP2 layout and the construction of its engine: ``parallelism=fsdp2`` and its variants."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError, check_at_least_one
from components.engines.fsdp2 import compile, context_parallel, float8, moe_checks, tensor_parallel
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.lora import check as adapter_check
from components.engines.fsdp2.parallelize import decoder_blocks, mlp_kinds
from components.engines.shared import process_group
from components.engines.shared.half_matmul import avoid_slow_products
from components.engines.shared.parallel_dims import divisors, suggest_sizes, world_size
from components.engines.shared.recomputation import check_modules, check_recomputed
from components.models import ModelSpec
from components.models.experts import EXPERT_PARAM
from components.optimizers import Optimizer, TorchClass, check_matches, needs_whole_weights


@dataclass(frozen=True)
class FSDP2(FSDP2Layout):
    """Sharded data, tensor, context and expert parallelism for any transformers causal language model."""

    computes_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = ("dp", "default_dp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        check_at_least_one("parallelism", self, *sizes, "blocks_per_group", "prefetch_groups")
        if self.dp_shard is not None:
            dp = self.dp_shard * self.dp_replicate
            if self.dp not in (None, dp):
                raise ConfigError(
                    f"parallelism.dp: {self.dp} is not {dp}, the product of parallelism.dp_shard and "
                    "parallelism.dp_replicate; leave out parallelism.dp."
                )
            object.__setattr__(self, "dp", dp)
            object.__setattr__(self, "dp_shard", None)  # so that replacing dp does not contradict dp_shard
        if self.dp is not None and self.dp % self.dp_replicate:
            raise ConfigError(
                f"parallelism.dp_replicate: {self.dp_replicate} does not divide parallelism.dp = {self.dp}; "
                f"use {suggest_sizes(self.dp_replicate, divisors(self.dp))}."
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
        optimizer: Optimizer,
        options: EngineOptions,
        *,
        world_size: int,
    ) -> None:
        """Check that the layout fits the model, the optimizer, the adapter and this machine.

        Raises:
            ConfigError: if the model has no decoder block, or, with ``tp`` above 1, no plan for tensor
                parallelism; if ``cp``, ``tp`` or ``ep`` ranks cannot split the model or the adapter; if an
                update needs all weights at once and there are several ranks; if an update needs unsharded
                weights and ``cpu_offload`` is set; if ``optimizer.groups`` do not match the trained weights;
                if float8, ``recompute_num_layers`` or ``recompute_modules`` is not possible; or if this
                machine cannot compile the model or run the requested kernels.
        """
        check_optimizer(optimizer, world_size, offloads=self.cpu_offload)
        if optimizer.groups:
            check_matches(
                optimizer.groups, tensors(model, options.adapter, whole=needs_whole_weights(optimizer))
            )
        check_recomputed(self.activation_checkpointing, self.recompute_num_layers, len(decoder_blocks(model)))
        check_modules(self.activation_checkpointing, self.recompute_modules, mlp_kinds(model))
        ranks = world_size // (self.dp_replicate * self.tp)
        tensor_parallel.check(model, self.tp, ranks)
        moe_checks.check(model, ep=self.ep, tp=self.tp, ranks=ranks, adapter=options.adapter)
        context_parallel.check(model, self.cp, self.tp)
        adapter_check(options.adapter, self.tp)
        if options.float8:
            float8.check(model, self, options.adapter, ranks)
        compile.check(model, options.device, compiled=options.compiled, kernels=options.kernels)

    def build(self, model: ModelSpec, optimizer: Optimizer, options: EngineOptions) -> FSDP2Engine:
        """Join the process group and build this rank's engine; collective over all ranks."""
        avoid_slow_products(options.device, options.dtype)
        with process_group.joined(options.device, options.timeout_s) as device:
            return FSDP2Engine(model, optimizer, self, options, device)


def check_optimizer(optimizer: Optimizer, world_size: int, *, offloads: bool) -> None:
    """Raise ConfigError if several ranks, or ranks with CPU offload, cannot run ``optimizer``."""
    if isinstance(optimizer, TorchClass) and world_size > 1:
        optimizer.check_divisible()
    if needs_whole_weights(optimizer) and offloads:
        raise ConfigError(
            "parallelism.cpu_offload: this optimizer gathers whole weights, which are not in host memory; "
            "set parallelism.cpu_offload=false."
        )


def tensors(model: PreTrainedModel, adapter: LoRA | None, *, whole: bool) -> list[list[str]]:
    """Return the names on disk of the trained weights in each tensor that has options of its own.

    Experts of a layer are in one tensor, gate_proj together with up_proj, unless the optimizer updates
    ``whole`` weights, which it takes out of the stack.
    """
    if adapter is not None:
        return grouped(
            (re.sub(r"\.experts\.\d+\.", ".experts.", name), name) for name in adapter.shapes(model)
        )
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return grouped((name if whole else EXPERT_PARAM.sub(stack_name, name), name) for name in trained)


def stack_name(found: re.Match[str]) -> str:
    """Return the name of the tensor that holds the weight of an expert, from a match of its name."""
    leaf = found["leaf"]
    return f"{found['experts']}.{'down' if leaf.startswith('down_proj') else 'gate_up'}"


def grouped(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the second strings of ``pairs``, in a list for each first string."""
    found: dict[str, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return list(found.values())
