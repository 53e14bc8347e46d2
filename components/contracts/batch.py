"""The micro-batch that data loaders create and that engines and losses read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.device_copy import to_device

IGNORE = -100
"""The label of a position without loss."""

UNDESIRABLE, DESIRABLE, KL_COMPLETION = 0, 1, 2
"""The values of ``Batch.sequence_labels``, besides -1."""


Fields = dict[str, Any]
"""Arguments of ``dataclasses.replace``, by name."""


@dataclass
class Batch:
    """One micro-batch: packed (all sequences end to end in one row) or padded (one sequence per row).

    Labels are shifted already: ``labels[t]`` is the token that should follow ``input_ids[t]``.
    An empty micro-batch holds one padding token, no label and one sequence of length zero.
    """

    input_ids: Tensor
    """int64 ``[1, T]`` packed, ``[B, T]`` padded on the right."""
    labels: Tensor
    """int64, like ``input_ids``; ``IGNORE`` at positions without loss."""
    position_ids: Tensor
    """int64, like ``input_ids``; counts from 0 within every sequence, or from the length of its prefix."""
    seqlens: Tensor
    """int32 ``[S]``: the number of tokens of every sequence, without padding and without its prefix."""
    cu_seqlens: Tensor | None = None
    """int32 ``[S + 1]``, packed only: the start of every sequence, and the end of the last one."""
    max_seqlen: int | None = None
    """Packed only: the maximum over sequences of the span in ``cu_seqlens`` plus the prefix length."""
    prefix_lengths: Tensor | None = None
    """int32 ``[S]``, packed only: the number of leading tokens of the preceding sequence that a sequence
    attends to as its own prefix. None means that every sequence attends only to itself."""
    num_keys: int | None = None
    """With ``prefix_lengths``: the number of attention keys, T plus the sum of ``prefix_lengths``."""
    sequence_keys: Tensor | None = None
    """int64 ``[S]``: a seed for the random numbers of each sequence (NEFTune, dropout of adapters), different
    in every train step. It does not depend on ranks, micro-batches or packing. None means that there are no
    random numbers."""
    pair_index: Tensor | None = None
    """int64 ``[S]``, preference data: ``2 * pair`` for chosen, ``2 * pair + 1`` for rejected, -1 without a
    pair."""
    margins: Tensor | None = None
    """float64 ``[S]``, ranked data: the margin by which the score of the chosen answer of a sequence's pair
    should exceed that of the rejected one."""
    sequence_labels: Tensor | None = None
    """int64 ``[S]``, unpaired data: DESIRABLE or UNDESIRABLE; KL_COMPLETION for the sequence after a sample,
    which has the prompt of that sample and the completion of another one; -1 without a label."""
    ref_logps: Tensor | None = None
    """float32, like ``labels``: the log-probabilities of the reference model, 0 at positions without a
    label."""
    pad_id: int | None = None
    """The token that fills padded rows. None means that it is not known."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers that a loss attached in ``prepare``."""
    label_index: Tensor | None = None
    """The cached result of ``labelled``. Code that changes labels sets it to None."""

    @classmethod
    def empty(cls, pad_id: int, *, pairs: bool, unpaired: bool, ranked: bool = False) -> Self:
        """Return a packed micro-batch without a sample, which every loss accepts."""
        return cls(
            input_ids=torch.tensor([[pad_id]]),
            labels=torch.tensor([[IGNORE]]),
            position_ids=torch.tensor([[0]]),
            seqlens=torch.tensor([0], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            max_seqlen=1,
            sequence_keys=torch.tensor([0]),
            pair_index=torch.tensor([-1]) if pairs else None,
            margins=torch.zeros(1, dtype=torch.float64) if ranked else None,
            sequence_labels=torch.tensor([-1]) if unpaired else None,
            pad_id=pad_id,
        )

    def to(self, device: torch.device) -> Self:
        """Return this micro-batch on ``device``, except ``pair_index`` and ``sequence_labels``.

        The host reads those two, so they stay in its memory. It does not wait for copies of other tensors.
        """
        tensors = self._tensors() | {"label_index": self.labelled()}
        moved: Fields = {name: to_device(tensor, device) for name, tensor in tensors.items()}
        read_here = {"pair_index": self.pair_index, "sequence_labels": self.sequence_labels}
        return replace(self, **moved | read_here)

    def pin_memory(self) -> Self:
        """Return this micro-batch in page-locked memory, with ``label_index`` computed."""
        tensors = self._tensors() | {"label_index": self.labelled()}
        pinned: Fields = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(self, **pinned)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def labelled(self) -> Tensor:
        """Return the positions in ``labels.reshape(-1)`` that carry a label: int64 ``[n]``.

        ``to`` computes them on the host: their number decides the size of the result, so the host would have
        to wait for an accelerator that computed them.
        """
        if self.label_index is not None:
            return self.label_index
        return (self.labels.reshape(-1) != IGNORE).nonzero()[:, 0]

    @property
    def num_sequences(self) -> int:
        return self.seqlens.numel()

    def sequence_ids(self) -> Tensor:
        """Return the index of each position's sequence: int64, like ``labels``."""
        if self.cu_seqlens is None:
            rows = torch.arange(self.num_sequences, device=self.labels.device)
            return rows[:, None].expand_as(self.labels)
        spans = self.cu_seqlens.diff().long()
        rows = torch.arange(self.num_sequences, device=self.labels.device)
        return rows.repeat_interleave(spans, output_size=self.labels.numel())[None]

    def real_sequence_ids(self) -> Tensor:
        """Return the index of each position's sequence, -1 on padding: int64, like ``labels``."""
        begin = self.seqlens.new_zeros(1) if self.cu_seqlens is None else self.cu_seqlens[:-1]
        ids, position = self.sequence_ids(), torch.arange(self.labels.shape[1], device=self.labels.device)
        end = (begin + self.seqlens)[ids]
        return ids.where(position < end, -1)

    def shifted(self, steps: int) -> Self:
        """Return this micro-batch with the ids and labels of each sequence shifted left by ``steps``.

        The last ``steps`` positions of each sequence, and padding, get id 0 and no label. Other fields are
        unchanged. The tensors must be in host memory.
        """
        ids, beyond = self.real_sequence_ids(), min(steps, self.labels.shape[1])
        inside = (F.pad(ids[:, steps:], (0, beyond), value=-1) == ids) & (ids >= 0)

        def shifted(values: Tensor, fill: int) -> Tensor:
            return F.pad(values[:, steps:], (0, beyond), value=fill).where(inside, fill)

        found: Fields = {
            "input_ids": shifted(self.input_ids, 0),
            "labels": shifted(self.labels, IGNORE),
        }
        return replace(self, **found, label_index=None)

    def sum_per_sequence(self, values: Tensor) -> Tensor:
        """Sum ``values`` (like ``labels``) over every sequence: float64 ``[S]``.

        The sum is in float64, because in float32 a sum of 500 terms is accurate only to 5e-4.
        """
        total = values.new_zeros(self.num_sequences, dtype=torch.float64)
        return total.index_add(0, self.sequence_ids().reshape(-1), values.reshape(-1).double())

    def scored_positions(self) -> Tensor:
        """Return the position in ``labels.reshape(-1)`` at which a classifier scores each sequence.

        As in transformers, that is the last token that is not ``pad_id``, even if the text itself ends with
        ``pad_id``. int64 ``[S]``; the entries of empty sequences are arbitrary.
        """
        assert self.pad_id is not None, "data loaders set the padding token"
        ids = self.real_sequence_ids().reshape(-1)
        scored = (ids >= 0) & (self.input_ids.reshape(-1) != self.pad_id)
        places = torch.arange(ids.numel(), device=ids.device).where(scored, 0)
        none = ids.new_zeros(self.num_sequences)
        return none.scatter_reduce(0, ids.clamp(min=0), places, "amax")

    def select(self, keep: Tensor) -> Self:
        """Return the sequences for which ``keep``, bool ``[S]``, is True.

        If ``keep`` is False everywhere, the result is an empty micro-batch. The tensors must be in host
        memory, because sizes are read from them, but ``ref_logps`` may be on a device. Prefixes are not
        supported.
        """
        assert self.prefix_lengths is None, "a prefix is not kept"
        if not keep.any():
            return self._empty()
        if self.cu_seqlens is None:
            longest = max(1, int(self.seqlens[keep].max()))
            kept = {name: values[:, :longest] for name, values in self._at(keep, dim=0).items()}
            return replace(self, **kept, **self._by_sequence(keep), label_index=None)
        spans = self.cu_seqlens.diff()
        kept = self._at(keep.repeat_interleave(spans.long()), dim=1)
        return replace(
            self,
            **kept,
            **self._by_sequence(keep),
            cu_seqlens=F.pad(spans[keep].cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen=int(spans[keep].max()),
            label_index=None,
        )

    def _by_position(self) -> Fields:
        """Return the tensors that have the shape of ``labels``, by name."""
        names = ("input_ids", "labels", "position_ids", "ref_logps")
        return {name: values for name in names if (values := getattr(self, name)) is not None}

    def _at(self, keep: Tensor, dim: int) -> Fields:
        """Return the tensors of ``_by_position`` without entries of ``dim`` for which ``keep`` is False."""
        places, tensors = keep.nonzero()[:, 0], self._by_position()
        return {n: t.index_select(dim, to_device(places, t.device)) for n, t in tensors.items()}

    def _by_sequence(self, keep: Tensor) -> Fields:
        """Return the tensors with one entry per sequence, by name, reduced to the kept sequences."""
        names = ("seqlens", "sequence_keys", "pair_index", "margins", "sequence_labels")
        return {name: values[keep] for name in names if (values := getattr(self, name)) is not None}

    def _empty(self) -> Self:
        """Return a micro-batch of one padding token and one sequence of length zero."""
        one = {name: values[:1, :1] for name, values in self._by_position().items()}
        first = torch.arange(self.num_sequences) == 0
        none = {name: torch.full_like(v, -1) for name, v in self._by_sequence(first).items()}
        blank = {
            "labels": torch.full_like(one["labels"], IGNORE),
            "seqlens": torch.zeros_like(self.seqlens[:1]),
        }
        packed = (
            {}
            if self.cu_seqlens is None
            else {"cu_seqlens": self.seqlens.new_tensor([0, 1]), "max_seqlen": 1}
        )
        if self.ref_logps is not None:
            blank["ref_logps"] = torch.zeros_like(one["ref_logps"])
        return replace(self, **one | none | blank | packed, label_index=None)
