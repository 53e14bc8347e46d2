"""Context parallelism: every rank holds an equally long range of consecutive positions of every row."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from components.contracts.batch import IGNORE, Batch
from components.contracts.device_copy import to_device
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.shared.parallel_dims import check_cp
from components.engines.shared.ulysses import AllGatherShards, rank_slice
from components.engines.shared.varlen_attention import attention_kwargs, sequence_spans

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the largest position of a batch, which some ranks lack."""


def check(model: PreTrainedModel, cp: int, tp: int) -> None:
    """Check that the heads and the rotary embedding of ``model`` allow ``cp`` ranks.

    Raises:
        ConfigError: if ``cp`` does not divide the heads of a tensor-parallel rank, or the frequencies of the
            rotary embedding depend on the longest sequence of the batch.
    """
    if cp == 1:
        return
    check_cp(cp, tp, model.config.get_text_config())
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds = found.values() if isinstance(found, dict) else [found]
        if kind := next((kind for kind in kinds if kind in BY_LENGTH), None):
            raise ConfigError(
                f"parallelism.cp: rope_type={kind} of {model.config.model_type} depends on the longest "
                "sequence of a batch, of which a rank has only a part; use parallelism.cp=1."
            )


@dataclass(frozen=True)
class ModelInput:
    """A micro-batch on the compute device, with the positions of labels and the arguments of attention."""

    batch: Batch
    """The micro-batch, with whole rows."""
    label_index: Tensor
    """int64 ``[n]``: the positions of labels among this rank's positions of all rows."""
    attention: Json
    """Arguments of the model for attention: the boundaries of the sequences in whole rows."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share every row. They get the same batches and must make the same calls.

    Rows are padded at the end to a multiple of cp; in a packed row the padding is an additional sequence.
    After the all-to-all of attention, rows are whole and in order.
    """

    group: dist.ProcessGroup

    @property
    def cp(self) -> int:
        return self.group.size()

    def shard(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's part ``[B, ceil(T / cp)]`` of ``[B, T]``, with ``fill`` on padding."""
        if self.cp == 1:
            return values
        padding = -values.shape[1] % self.cp
        return rank_slice(F.pad(values, (0, padding), value=fill), self.cp, self.group.rank())

    def gather(self, values: Tensor | None, length: int) -> Tensor | None:
        """Gather ``[B, L]`` of every rank to ``[B, length]`` without padding, on every rank.

        None is returned as None. Differentiable if every rank computes the same function of the result.
        """
        if values is None or self.cp == 1:
            return values
        gathered: Tensor = AllGatherShards.apply(values, self.group)
        return gathered[:, :length].clone()  # FSDP adds hooks to it, which views may lose

    def model_input(self, here: Batch, device: torch.device) -> ModelInput:
        """Copy ``here``, which is in host memory, to ``device``; the host does not wait."""
        batch, padding = here.to(device), -here.labels.shape[1] % self.cp
        spans = sequence_spans(with_padding(here, padding))
        attention = attention_kwargs(with_padding(batch, padding), spans)
        if self.cp == 1:
            return ModelInput(batch, batch.labelled(), attention)
        index = replace(here, labels=self.shard(here.labels, IGNORE), label_index=None).labelled()
        attention["context_group"] = self.group
        return ModelInput(batch, to_device(index, device), attention)


def with_padding(batch: Batch, padding: int) -> Batch:
    """Return ``batch`` with its boundaries extended by ``padding`` positions at the end of the rows."""
    if batch.cu_seqlens is None or not padding:
        return batch
    assert batch.max_seqlen is not None
    end = batch.labels.shape[1] + padding
    prefixes = batch.prefix_lengths
    return replace(
        batch,
        seqlens=F.pad(batch.seqlens, (0, 1)),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=end),
        max_seqlen=max(batch.max_seqlen, padding),
        prefix_lengths=None if prefixes is None else F.pad(prefixes, (0, 1)),
        num_keys=None if batch.num_keys is None else batch.num_keys + padding,
    )
