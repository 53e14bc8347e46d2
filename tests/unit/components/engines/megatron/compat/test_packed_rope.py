"""The rotary embedding of packed rows, against megatron-core's own."""

import torch

import components.engines.megatron.runtime  # noqa: F401  installs the patches
from components.engines.megatron.compat import packed_rope  # isort: split

from megatron.core.models.common.embeddings import rope_utils


class OneRank:
    """A context-parallel group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def test_a_lookup_by_position_rotates_as_one_call_per_sequence() -> None:
    torch.manual_seed(0)
    (patch,) = packed_rope.PATCHES
    (original,) = patch.originals.values()
    ends = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])
    heads, table = torch.randn(9, 2, 6), torch.randn(5, 1, 1, 6)
    packed_rope.remember(ends, positions)
    ours = rope_utils._apply_rotary_pos_emb_thd(heads, ends, table, cp_group=OneRank())
    assert torch.equal(ours, original(heads, ends, table, cp_group=OneRank()))  # type: ignore[operator]
    packed_rope.remember(ends, positions.flip(0))
    assert not torch.equal(rope_utils._apply_rotary_pos_emb_thd(heads, ends, table), ours)
