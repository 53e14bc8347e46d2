"""The sizes of ``parallelism=fsdp2``: how ranks share the model and the data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from components.engines.shared.recomputation import Module

T = TypeVar("T")


@dataclass(frozen=True)
class FSDP2Layout:
    """The keys of conf/parallelism/fsdp2.yaml.

    ``dp`` ranks share a global batch, and every parameter is sharded over them. With ``dp_replicate`` copies
    of each parameter (hybrid sharding), a copy is sharded over ``dp / dp_replicate`` ranks.
    """

    dp: int | None = None
    """Number of data-parallel ranks. None means ``dp_shard * dp_replicate`` if ``dp_shard`` is given. If not,
    it means as many ranks as fill the launcher's WORLD_SIZE, or without a launcher the visible GPUs, or
    without GPUs ``default_dp``."""
    default_dp: int = 2
    """Value of ``dp`` without a launcher and GPUs, rounded up to a multiple of ``dp_replicate``."""
    reshard_after_forward: bool = True
    """Whether the gathered weights of a block are freed between its forward and its backward pass."""
    blocks_per_group: int = 1
    """Number of consecutive blocks whose weights are gathered, and whose gradients are reduced, together.
    Larger groups send fewer and larger messages, and need more memory."""
    prefetch_groups: int | None = None
    """Number of groups of blocks whose gathers are begun before the current group computes. None means FSDP's
    own order: the host begins the gather of a group in the forward pass when it reaches the group, and in the
    backward pass one group ahead."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """The part of the model that is recomputed in the backward pass: nothing, every block (``full``), or only
    attention or other modules of every block (``selective``)."""
    recompute_num_layers: int | None = None
    """With ``activation_checkpointing=full``: number of blocks that are recomputed, starting with the first
    block of the model. None means all."""
    recompute_modules: tuple[Module, ...] | None = None
    """With ``activation_checkpointing=selective``: the modules of every block that are recomputed. None means
    only ``core_attn``."""
    activation_offloading: bool = False
    """Whether activations of blocks are in host memory between the forward and the backward pass."""
    dp_replicate: int = 1
    """Number of groups of ranks that each hold a copy of every parameter. These groups exchange only
    gradients."""
    cp: int = 1
    """Number of ranks that split every row of a batch by position, and over which parameters are also
    sharded."""
    tp: int = 1
    """Number of ranks that split the matrices of the model, and process the same rows of a batch."""
    cpu_offload: bool = False
    """Whether shards, gradients and optimizer state are in host memory, and the optimizer runs on the CPU."""
    ep: int = 1
    """Number of neighbouring ranks, among the ``dp / dp_replicate * cp`` ranks of a copy, that split the
    experts."""
    reduce_gradients: Literal["last", "every"] = "last"
    """The micro-batches of a step after which gradients are reduced. With ``last``, every rank accumulates
    the gradients of the whole model in fp32. With ``every``, it accumulates only those of its shard, and they
    are reduced more often."""
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """torchao's name of the recipe by which ``run.dtype=fp8`` rounds. The scales of ``tensorwise`` depend on
    all tokens of a micro-batch. Other recipes scale each row by a power of 2, so that the rounding of a token
    does not depend on the micro-batch."""
    fp8_all_gather: bool = False
    """Whether weights are rounded to float8 before they are gathered."""
    dp_shard: int | None = field(default=None, repr=False)
    """Number of data-parallel ranks that share one copy of every parameter, from which ``dp`` is set. None
    means ``dp / dp_replicate``."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks, over which a global batch is split."""
        return world_size // (self.cp * self.tp)

    def groups(self, blocks: Sequence[T]) -> list[Sequence[T]]:
        """Return the blocks of a model in groups that are gathered together; the last one may be smaller."""
        size = self.blocks_per_group
        return [blocks[first : first + size] for first in range(0, len(blocks), size)]

    def ranks_with_own_experts(self, number: int, shards: int) -> int:
        """Return the number of ranks that split ``number`` experts of a layer into parts of whole experts.

        These are all ``shards`` ranks that shard a parameter, if they can have equal parts. If not, the ep
        ranks have such parts, and FSDP splits the matrices of these experts.
        """
        return shards if number % shards == 0 else self.ep

    def gathers_frozen(self, shards: int) -> bool:
        """Return whether FSDP also gathers frozen weights, which are sharded over ``shards`` ranks.

        A single rank has them in full, in the compute dtype: a gathered copy would take as much memory again.
        """
        return shards > 1 or self.cpu_offload or self.fp8_all_gather
