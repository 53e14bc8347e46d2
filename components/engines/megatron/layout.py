"""The sizes of ``parallelism=megatron``: how ranks share the model and the data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """The keys of conf/parallelism/megatron.yaml, with its values."""

    tp: int = 1
    """Ranks that split every matrix, and the vocabulary."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Chunks of layers that every stage holds (interleaved pipeline); 1: one."""
    cp: int = 1
    """Ranks that split every sequence."""
    ep: int = 1
    """Ranks that share out the experts of every layer, among tp x cp x dp."""
    etp: int = 1
    """Ranks that split the matrices of every expert."""
    dp: int | None = None
    """Data-parallel ranks; None: what WORLD_SIZE or the visible GPUs leave, else ``default_dp``."""
    default_dp: int = 1
    sequence_parallel: bool = False
    """Split what tensor parallelism replicates (norms, residuals) over its ranks, by position."""
    cp_comm_type: Literal["all_gather", "a2a"] = "all_gather"
    """How ranks of ``cp`` see each other's tokens: keys and values gathered, or heads for positions."""
    distributed_optimizer: bool = False
    """Shard optimizer state and fp32 main parameters over dp x cp."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    """Gradients a bucket reduces at once, in elements; None: Megatron's default."""
    pipeline_layout: str | None = None
    """Megatron's layout string, a part for every chunk of every stage, in the order of layers."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What is computed again in the backward: nothing, every layer, or attention alone."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """auto: transformer-engine where it is installed and can compute the run."""
    optimizer_cpu_offload: bool = False
    moe_token_dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens get to their experts: all to every rank of ep x etp, or each to its own."""
    capacity_factor: float | None = None
    """An expert takes at most so many times its even share of a rank's tokens; None: all that chose it."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which it takes where more chose it: those that weigh it most, or the first."""
    moe_pad_to_capacity: bool = False
    """Every expert computes as many tokens as it has room for."""
    shared_expert_overlap: bool = False
    """Compute shared experts while tokens are under way."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp
