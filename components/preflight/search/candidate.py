"""The inputs of all estimates of memory and time, and variations of them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.configs import Prepared
from components.contracts.engine import EngineOptions, Kernels, Reference
from components.contracts.json_types import Config
from components.contracts.loss import Loss
from components.engines.fsdp2.compile import choose_kernels
from components.engines.shared.parallel_dims import divisors
from components.optimizers import Optimizer
from components.preflight.checks import check_batch, check_shared_prompt
from components.preflight.engine_layouts import EngineLayout, memory
from components.preflight.estimates.device_specs import Device
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory
from components.preflight.estimates.workload import largest_microbatch

TOLERANCE = 0.15


@dataclass(frozen=True)
class Candidate:
    """The properties of an experiment with one layout that determine its memory and step time."""

    layout: EngineLayout
    world_size: int
    model: PreTrainedModel
    """The transformers model on the meta device, without its adapter."""
    adapter: LoRA | None
    optimizer: Optimizer
    loss: Loss
    reference: Reference
    """Source of the reference log-probabilities in the engine."""
    reference_model: PreTrainedModel | None
    """The reference model on the meta device. None means that it has the shape of ``model``."""
    data: Prepared
    micro_batch_size: int
    dtype: torch.dtype
    device: Device
    compiled: bool
    kernels: Kernels
    float8: bool
    """Whether matrix products are in float8."""
    weight_copies: int
    """Number of fp32 copies of the trained weights that hooks keep."""
    shares_prompts: bool
    max_length: int
    """Maximum number of tokens of a row (``data.max_length``)."""
    keeps_microbatch_size: bool
    """Whether the loss depends on the size of micro-batches; then no other size is suggested."""
    may_add_adapter: bool
    """Whether no other option of the model, such as ``model.add_tokens``, excludes an adapter."""
    layout_keys: frozenset[str]
    """Keys of the chosen option of the config group ``parallelism``."""
    cut: int = 1
    """Divisor of ``max_length``; above 1 only in a variation with shorter rows."""

    @property
    def dp_size(self) -> int:
        return self.layout.dp_size(self.world_size)

    @property
    def microbatch(self) -> MicrobatchShape:
        """Shape of the largest micro-batch."""
        found = largest_microbatch(self.data, self.micro_batch_size, self.dp_size)
        # Packed rows are filled up to the limit; a padded row is as long as its longest sample.
        packed = self.data.packing != "none"
        length = -(-found.length // self.cut) if packed else min(found.length, self.max_length // self.cut)
        labels, longest = -(-found.labels * length // found.length), found.longest_sequence
        longest = None if longest is None else min(longest, self.max_length // self.cut)
        return replace(found, length=length, labels=labels, longest_sequence=longest)

    @property
    def rows_per_step(self) -> int:
        """Most rows of a step on all ranks together; less than a global batch if an epoch is shorter."""
        return self.dp_size * self.microbatch.num_microbatches * self.micro_batch_size

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Peak memory in a train step of one rank of each pipeline stage."""
        kind = self.device.kind
        step = MemoryInputs(
            world_size=self.world_size,
            dtype=self.dtype,
            device=kind,
            microbatch=self.microbatch,
            loss=self.loss,
            reference=self.reference,
            reference_model=self.reference_model,
            adapter=self.adapter,
            float8=self.float8,
            weight_copies=self.weight_copies,
            tiled_norms=kind == "cpu"
            and choose_kernels(self.kernels, self.model, kind, compiled=self.compiled) == "tiled",
            packed=self.data.packing != "none",
        )
        return memory(self.layout, self.model, self.optimizer, step)

    @property
    def peak(self) -> RankMemory:
        """Memory of the pipeline stage that needs the most."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def memory_budget(self) -> int:
        """Bytes that the estimate of a rank may reach before the run is refused.

        If ranks share the memory of the machine, the tolerance of the estimate is added, so that only clear
        misfits are rejected.
        """
        return self.device.memory if self.device.certain else int(self.device.memory * (1 + TOLERANCE))

    @property
    def host_memory(self) -> int:
        """Bytes that the ranks of one machine offload, if it has equally many ranks of every stage."""
        ranks = min(self.world_size, self.device.per_node)
        return sum(size for rank in self.memory for size in rank.host.values()) * ranks // len(self.memory)

    @property
    def fits_host(self) -> bool:
        return self.device.host is None or self.host_memory <= self.device.host

    @property
    def micro_batches(self) -> list[int]:
        """Possible micro-batch sizes: divisors, up to 16, of the number of rows of a data-parallel rank.

        There are none if the data-parallel ranks cannot split the global batch evenly. If the loss depends
        on the size, only the given one is possible.
        """
        share, rest = divmod(self.data.global_batch_size, self.dp_size)
        sizes = [] if rest else divisors(share)
        if self.keeps_microbatch_size:
            return [size for size in sizes if size == self.micro_batch_size]
        return [size for size in sizes if size <= 16]

    def with_largest_microbatch(self) -> Self:
        """Return a copy with the most rows per micro-batch that fit, or else with the least memory."""
        share = self.data.global_batch_size // self.dp_size
        cases = [replace(self, micro_batch_size=size) for size in reversed(divisors(share))]
        fitting = (case for case in cases if case.fits())
        return next(fitting, None) or min(cases, key=lambda case: case.peak.total)

    def fits(self) -> bool:
        """Return whether the estimate fits without a tolerance, as a size or a layout that is chosen must."""
        return self.peak.total <= self.device.memory and self.fits_host

    def check(self) -> None:
        """Raise ConfigError if the layout, the batch and the model are incompatible."""
        check_shared_prompt(self.shares_prompts, self.layout)
        check_batch(self.data.global_batch_size, self.micro_batch_size, self.dp_size)
        options = EngineOptions(
            self.dtype,
            self.device.kind,
            adapter=self.adapter,
            compiled=self.compiled,
            kernels=self.kernels,
            float8=self.float8,
        )
        self.layout.check(self.model, self.optimizer, options, world_size=self.world_size)
        if self.adapter is not None:
            self.adapter.check(self.model)

    def with_layout(self, changes: Config) -> Self:
        """Return a copy with ``changes`` of the keys of the layout, and the number of ranks that results.

        Raises:
            ConfigError: if the keys contradict each other.
        """
        layout = replace(self.layout, **changes)
        ranks = layout.world_size({}, 0) if "dp" in changes else self.world_size
        return replace(self, layout=layout, world_size=ranks, device=self.device.shared_by(ranks))
