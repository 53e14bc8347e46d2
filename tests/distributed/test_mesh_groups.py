"""The process groups that preflight reports are those that engines create."""

import pytest

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.preflight.engine_layouts import mesh_info
from components.preflight.search.rank_groups import groups
from tests.distributed.cases import fsdp2, megatron
from tests.distributed.group_cases import groups_of_all
from tests.ranks import Ranks

LAYOUTS = [
    fsdp2(4),
    fsdp2(4, dp_replicate=2),
    fsdp2(2, tp=2),
    fsdp2(2, cp=2),
    fsdp2(1, cp=2, tp=2),
    megatron(tp=2, pp=2),
    megatron(tp=2, dp=2),
    megatron(cp=2, dp=2),
    megatron(pp=2, dp=2),
    megatron(tp=2, cp=2),
    megatron(dp=4),
    fsdp2(4, ep=2),
    fsdp2(2, cp=2, ep=2),
    megatron(dp=4, ep=2),
    megatron(pp=2, dp=2, ep=2),
    megatron(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("engine", [FSDP2, Megatron])
def test_groups_are_those_of_four_ranks(engine: type[FSDP2 | Megatron], megatron_ranks: Ranks) -> None:
    layouts = [on for on in LAYOUTS if isinstance(on, engine)]
    for rank, found in enumerate(megatron_ranks.run(groups_of_all, layouts)):
        for on, (own, mesh) in zip(layouts, found, strict=True):
            told = groups(on, 4)
            assert told, on
            assert mesh == mesh_info(on, 4), on
            assert own == {name: next(g for g in each if rank in g) for name, each in told.items()}, on
