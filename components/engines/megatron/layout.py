"""The sizes of ``parallelism=megatron``: how ranks share the model and the data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """The keys of conf/parallelism/megatron.yaml."""

    tp: int
    """Ranks that split every matrix, and the vocabulary."""
    pp: int
    """Pipeline stages."""
    vpp: int
    """Chunks of layers that every stage holds (interleaved pipeline); 1: one."""
    cp: int
    """Ranks that split every sequence."""
    dp: int | None
    """Data-parallel ranks; None: what WORLD_SIZE or the visible GPUs leave, else ``default_dp``."""
    default_dp: int
    sequence_parallel: bool
    """Split what tensor parallelism replicates (norms, residuals) over its ranks, by position."""
    cp_comm_type: Literal["all_gather", "a2a"]
    """How ranks of ``cp`` see each other's tokens: keys and values gathered, or heads for positions."""
    distributed_optimizer: bool
    """Shard optimizer state and fp32 main parameters over dp x cp."""
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: int | None
    """Gradients a bucket reduces at once, in elements; None: Megatron's default."""
    pipeline_layout: str | None
    """Megatron's layout string, a part for every chunk of every stage, in the order of layers."""
    first_stage_layers: int | None
    last_stage_layers: int | None
    activation_checkpointing: Literal["none", "full", "selective"]
    """What is computed again in the backward: nothing, every layer, or attention alone."""
    transformer_impl: Literal["auto", "local", "transformer_engine"]
    """auto: transformer-engine where it is installed and can compute the run."""
    optimizer_cpu_offload: bool

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp
