"""The rotary embedding of packed rows with one lookup by position, in place of one slice per sequence.

In every layer, megatron-core cuts queries and keys into sequences, copies the first rows of its table of
frequencies for each sequence, and computes their cosines and sines. These are thousands of calls per
micro-batch, for which a GPU often waits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils.weak import WeakTensorKeyDictionary

from components.engines.megatron.compat.patching import Patch
from components.engines.shared.torch_private import storage_key

_positions = WeakTensorKeyDictionary()
"""Positions of the tokens of a packed row, int64 ``[L]``, by the tensor of its boundaries."""
_tables = WeakTensorKeyDictionary()
"""The key of the last rotation with these boundaries, its frequencies, and the result of ``rope_table``."""


def remember(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Store ``positions``, which the embedding uses for the row whose boundaries are this ``cu_seqlens``.

    They are int64 ``[L]`` on the model's device, and ``L`` is the length of this rank's share of the row.
    They are stored as long as the tensor ``cu_seqlens`` exists.
    """
    _positions[cu_seqlens] = positions
    _tables.pop(cu_seqlens, None)


def rope_table(cu_seqlens: Tensor, freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``mscale`` times the cosines and the sines of a row's rotary angles, ``[L, 1, D]`` in ``dtype``.

    The first half of the sines is negated. Layers that are given the same ``freqs`` share the result, also
    when they are computed again, with a detached ``freqs``.
    """
    known = _tables.get(cu_seqlens)
    key = storage_key(freqs), freqs.shape, mscale, dtype
    if known is None or known[0] != key:
        angles = freqs.index_select(0, _positions[cu_seqlens]).squeeze(1)
        cos, sin = ((of(angles) * mscale).to(dtype) for of in (torch.cos, torch.sin))
        first, second = sin.chunk(2, dim=-1)
        # With ``freqs`` itself, so that no other tensor gets its storage.
        known = _tables[cu_seqlens] = (key, freqs, cos, torch.cat((-first, second), dim=-1))
    return known[2], known[3]


class Rotation(torch.autograd.Function):
    """The rotation of ``[L, heads, D]`` by the result of ``rope_table``, with four kernels in each direction.

    Results and gradients are those of Megatron's expression to the last bit, in which autograd would launch
    three times as many. Both are contiguous, whatever the memory of the input looks like, so that the bits of
    later products do not depend on it.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return swap(t).mul_(sin).add_(t * cos)

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[misc]
        return swap(grads[0] * sin).add_(grads[0] * cos), None, None


def swap(t: Tensor) -> Tensor:
    """Return a contiguous copy of ``t`` with the two halves of the last dimension exchanged."""
    first, second = t.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def by_positions(_: object) -> Callable[..., Tensor]:
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        mscale: float = 1.0,
        cp_group: object = None,  # noqa: ARG001  the positions are those of this rank
        **options: object,
    ) -> Tensor:
        """Rotate ``[L, heads, D]`` with the rows of ``freqs``, ``[length, 1, 1, D]``, for their positions.

        ``options`` are the other ones of the function for rows that are not packed.
        """
        if not any(options.values()) and freqs.shape[-1] == t.shape[-1]:
            turned: Tensor = Rotation.apply(t, *rope_table(cu_seqlens, freqs, mscale, t.dtype))
            return turned
        packed = freqs.index_select(0, _positions[cu_seqlens])
        apply = rope_utils._apply_rotary_pos_emb_bshd
        rotated: Tensor = apply(t.unsqueeze(1), packed, mscale=mscale, **options)
        return rotated.squeeze(1)

    return rotate


PATCHES = (
    Patch(
        symbols=("megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd",),
        why="slices and concatenates for every sequence, in every layer",
        replace=by_positions,
    ),
)
