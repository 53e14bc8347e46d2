"""The rotary embedding of packed rows with one lookup by position, in place of one slice per sequence.

In every layer, megatron-core cuts queries and keys into sequences, and copies the first rows of its table of
frequencies for each sequence. These are thousands of calls per micro-batch, for which a GPU often waits.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from components.engines.megatron.compat.patching import Patch

_positions = WeakTensorKeyDictionary()
"""Positions of the tokens of a packed row, int64 ``[L]``, by the tensor of its boundaries."""


def remember(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Store ``positions``, which the embedding uses for the row whose boundaries are this ``cu_seqlens``.

    They are int64 ``[L]`` on the model's device, and ``L`` is the length of this rank's share of the row.
    They are stored as long as the tensor ``cu_seqlens`` exists.
    """
    _positions[cu_seqlens] = positions


def by_positions(_: object) -> Callable[..., Tensor]:
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        cp_group: object = None,  # noqa: ARG001  the positions are those of this rank
        **options: object,
    ) -> Tensor:
        """Rotate ``[L, heads, D]`` with the rows of ``freqs``, ``[length, 1, 1, D]``, for their positions.

        ``options`` are those of the function for rows that are not packed.
        """
        packed = freqs.index_select(0, _positions[cu_seqlens])
        rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), packed, **options)
        return rotated.squeeze(1)

    return rotate


PATCHES = (
    Patch(
        symbols=("megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd",),
        why="slices and concatenates for every sequence, in every layer",
        replace=by_positions,
    ),
)
