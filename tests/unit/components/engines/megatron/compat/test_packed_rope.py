"""The rotary embedding of packed rows, against megatron-core's own."""

import weakref

import pytest
import torch

import components.engines.megatron.runtime  # noqa: F401  installs the patches
from components.engines.megatron.compat import packed_rope  # isort: split

from megatron.core.models.common.embeddings import rope_utils

from components.engines.megatron.runtime.attention import packed_seq_params
from components.engines.megatron.runtime.cp_sharding import shard_batch
from tests.distributed.cases import LAYOUTS, sequences


class OneRank:
    """A context-parallel group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("rotated", "options"),
    [
        (6, {}),
        (4, {}),
        (6, {"mscale": 1.25}),
        (6, {"rotary_interleaved": True}),
        (6, {"multi_latent_attention": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_by_position_rotates_as_one_call_per_sequence(
    rotated: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    """Results and gradients have the bits of Megatron's function, also with cosines of an earlier call."""
    torch.manual_seed(0)
    (patch,) = packed_rope.PATCHES
    (original,) = patch.originals.values()
    ends = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])
    table, weights = torch.randn(5, 1, 1, rotated), torch.randn(9, 2, 6).to(dtype)
    packed_rope.remember(ends, positions)
    for heads in torch.randn(2, 9, 2, 6).to(dtype):
        found = []
        for rotate in (rope_utils._apply_rotary_pos_emb_thd, original):
            given = heads.clone().requires_grad_()
            ours = rotate(given, ends, table, cp_group=OneRank(), **options)  # type: ignore[operator]
            (ours * weights).sum().backward()
            assert given.grad is not None
            found.append((ours, given.grad))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    packed_rope.remember(ends, positions.flip(0))
    assert not torch.equal(rope_utils._apply_rotary_pos_emb_thd(heads, ends, table, **options), ours)


def test_other_frequencies_are_not_those_of_the_call_before() -> None:
    ends, heads = torch.tensor([0, 2], dtype=torch.int32), torch.randn(2, 1, 6)
    packed_rope.remember(ends, torch.arange(2))
    slow, fast = (
        rope_utils._apply_rotary_pos_emb_thd(heads, ends, torch.full((2, 1, 1, 6), angle))
        for angle in (0.1, 1.0)
    )
    assert not torch.equal(slow, fast)


def test_layers_that_are_computed_again_share_the_table_until_their_pass_ends() -> None:
    row = shard_batch(LAYOUTS["packed"](sequences()), cp=1, rank=0, multiple=1)
    packed, freqs = packed_seq_params(row), torch.randn(64, 1, 1, 6)
    assert packed is not None
    first, again = (
        weakref.ref(packed_rope.rope_table(packed.cu_seqlens_q, of, 1.0, torch.float32)[0])
        for of in (freqs, freqs.detach())
    )
    assert first() is again() is not None
    del packed
    assert first() is None
