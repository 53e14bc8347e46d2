"""The sizes of ``parallelism=fsdp2``: how ranks share the model and the data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FSDP2Layout:
    """The keys of conf/parallelism/fsdp2.yaml.

    ``dp`` ranks share a global batch, and every parameter is sharded over them. With ``dp_replicate`` copies
    (hybrid sharding) a parameter is sharded over ``dp / dp_replicate`` ranks.
    """

    dp: int | None
    """Data-parallel ranks; None: WORLD_SIZE, else the visible GPUs, else ``default_dp``."""
    default_dp: int
    """Where it is no multiple of ``dp_replicate``, the next one."""
    reshard_after_forward: bool
    """Free the gathered weights of a block between its forward and its backward."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
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

    def dp_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""
        return world_size // (self.cp * self.tp)
