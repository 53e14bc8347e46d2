"""The hashes from which the adapters of a chunk draw their dropout, for the positions that a rank has."""

from dataclasses import dataclass, field
from typing import Self

import torch
from megatron.core import parallel_state
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.device_copy import to_device
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.cp_sharding import CPShard
from components.engines.shared.adapter_dropout import TokenHashes, dropout_hashes
from components.engines.shared.token_hash import token_hashes


@dataclass(frozen=True)
class MicrobatchHashes:
    """The hashes of a micro-batch, int32, in the order of the layers' inputs."""

    rows: Tensor
    """``[L, B]``: of this rank's share of the rows."""
    split: Tensor
    """``[L / tp, B]`` with sequence parallelism, where tp ranks split the positions; otherwise ``rows``."""

    @classmethod
    def of(cls, batch: Batch, row: CPShard, layout: Layout, seed: int, device: torch.device) -> Self:
        """Return the hashes of this rank's share ``row`` of ``batch``."""
        hashes = dropout_hashes(row.scatter(token_hashes(batch, seed))).t().contiguous()
        rows = split = to_device(hashes, device)
        if layout.sequence_parallel:
            split = rows.chunk(layout.tp)[parallel_state.get_tensor_model_parallel_rank()]
        return cls(rows, split)


@dataclass(frozen=True)
class InputHashes:
    """The hashes of the micro-batch whose pass through the chunk is running."""

    rows: TokenHashes = field(default_factory=TokenHashes)
    split: TokenHashes = field(default_factory=TokenHashes)

    def use(self, given: MicrobatchHashes | None) -> None:
        self.rows.values, self.split.values = (None, None) if given is None else (given.rows, given.split)
