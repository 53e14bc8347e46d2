"""Large layouts become smaller dimension by dimension."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.proof.small_layout import MOST_RANKS, resized, size_names, small_layouts

SHARDED = FSDP2(dp=None, default_dp=64, reshard_after_forward=True)


@dataclass(frozen=True)
class Own:
    """A layout of the user's own, with sizes like ours."""

    tp: int
    dp: int

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:  # noqa: ARG002
        return self.tp * self.dp

    def dp_size(self, world_size: int) -> int:
        return world_size // self.tp


class Fixed:
    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:  # noqa: ARG002
        return 16


@pytest.mark.parametrize(
    ("large", "first"),
    [
        (Megatron(tp=8, pp=4, dp=16), "tp2 pp2 dp2"),
        (Megatron(tp=8, pp=4, cp=4, dp=16), "tp2 pp2 cp2"),
        (Megatron(tp=8, sequence_parallel=True, ep=8, dp=16), "tp2 ep2 dp2"),
        (Megatron(pp=16, pipeline_layout="Et|" + "t|" * 14 + "tL"), "pp2"),
        (
            FSDP2(dp=64, dp_replicate=8, default_dp=1, reshard_after_forward=True, tp=4),
            "tp2 dp_replicate2 dp4",
        ),
        (replace(SHARDED, dp=512), "dp2"),
        (SHARDED, "dp2"),
        (Own(tp=4, dp=8), "tp2 dp2"),
        (Megatron(tp=4, dp=2), "tp4 dp2"),
        (Own(tp=1, dp=7), "dp7"),
    ],
    ids=repr,
)
def test_two_of_every_dimension(large: Any, first: str) -> None:
    layouts = list(small_layouts(large))
    assert " ".join(size_names(layouts[0])) == first
    assert all(layout.world_size({}, 0) <= MOST_RANKS for layout in layouts)
    assert getattr(layouts[0], "pipeline_layout", None) is None
    if large.world_size({}, 0) <= MOST_RANKS:
        assert layouts == [large]


def test_a_layout_that_cannot_be_smaller_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallelism: has 16 ranks, a proof at most 8, and Fixed has"):
        next(small_layouts(Fixed()))  # type: ignore[arg-type]


def test_numbers_of_layers_do_not_stay() -> None:
    large = FSDP2(dp=2, activation_checkpointing="full", recompute_num_layers=16)
    assert resized(large, {}) == replace(large, recompute_num_layers=None)
