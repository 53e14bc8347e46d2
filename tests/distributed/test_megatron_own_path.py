"""Our step in several calls against Megatron's schedule and hooks for a whole step."""

from typing import Any

import pytest
import torch

from components.engines.megatron import Megatron
from tests.distributed import megatron_own_path_cases as cases
from tests.distributed.cases import fsdp2, megatron
from tests.ranks import Ranks

OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 10_000}
SHARDED = {**OVERLAPPED, "distributed_optimizer": True, "overlap_param_gather": True}
LAYOUTS = {
    "single": megatron(dp=1),
    "dp2 overlapped": megatron(dp=2, **OVERLAPPED),
    "dp2 distributed optimizer": megatron(dp=2, distributed_optimizer=True),
    "dp2 distributed optimizer, overlapped": megatron(dp=2, **SHARDED),
    "cp2": megatron(cp=2, dp=1),
    "pp2dp2 overlapped": megatron(pp=2, dp=2, **OVERLAPPED),
    "pp2vpp2": megatron(pp=2, vpp=2, dp=1),
    "pp2vpp2dp2 overlapped": megatron(pp=2, vpp=2, dp=2, **OVERLAPPED),
    "tp2pp2 sp": megatron(tp=2, pp=2, dp=1, sequence_parallel=True),
}


@pytest.fixture(scope="module")
def pools() -> dict[int, Ranks]:
    return {size: Ranks(size, megatron=True) for size in (1, 2, 4)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_calls_and_one_finish_are_megatrons_own_step(pools: dict[int, Ranks], layout: Megatron) -> None:
    pool = pools[layout.world_size({}, 0)]
    own = pool.run(cases.own_step, layout)[0]
    for last in (True, False) if layout.overlap_grad_reduce else (True,):
        ours = pool.run(cases.split_step, layout, last)[0]
        assert ours.keys() == own.keys()
        for name, expected in own.items():
            error = (ours[name] - expected).norm() / expected.norm()
            assert error <= 1e-6, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "overlapped" in name])
def test_gradients_are_reduced_during_the_backward_pass(pools: dict[int, Ranks], name: str) -> None:
    layout = LAYOUTS[name]
    assert all(pools[layout.world_size({}, 0)].run(cases.reduces_in_backward, layout))


def test_stages_send_no_padding(pools: dict[int, Ranks]) -> None:
    for computed, lengths in pools[2].run(cases.lengths_on_stages, megatron(pp=2, dp=1)):
        assert computed == lengths
        assert len(set(lengths)) > 1


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 2}], ids=str)
def test_weights_are_gathered_before_a_layer_needs_them(pools: dict[int, Ranks], sizes: Any) -> None:
    layout = megatron(**sizes, **SHARDED)
    expected = torch.tensor(pools[1].run(cases.gathers_of_three_steps, fsdp2())[0][0])
    for curve, begun in pools[layout.world_size({}, 0)].run(cases.gathers_of_three_steps, layout):
        assert torch.tensor(curve) == pytest.approx(expected, rel=1e-5)
        assert len(begun) > 3
        assert all(begun)
