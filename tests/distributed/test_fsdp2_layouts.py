"""What every layout of FSDP2 must do as one process does it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.engines.fsdp2 import FSDP2
from tests.distributed import engine_cases as cases
from tests.distributed.cases import assert_same, fsdp2, megatron, plain_model, plain_step
from tests.distributed.shared_prompt_cases import dpo_step, plain_dpo_step
from tests.pairs import make_pairs
from tests.ranks import Ranks

LAYOUTS = {
    "hsdp": fsdp2(4, dp_replicate=2),
    "copies": fsdp2(2, dp_replicate=2),
    "offload": fsdp2(2, cpu_offload=True),
    "tp2": fsdp2(1, tp=2),
    "tp2dp2": fsdp2(2, tp=2),
}
EVERY = pytest.mark.parametrize("name", LAYOUTS)


class Pools:
    """Ranks of every number that is asked for."""

    def __init__(self) -> None:
        self.pools: dict[int, Ranks] = {}

    def run(self, function: Callable[..., Any], on: FSDP2, *args: Any) -> list[Any]:
        """``function(on, ...)`` on the ranks that ``on`` takes; what each returned."""
        size = on.world_size({}, 0)
        if size == 1:
            return [function(on, *args)]
        if size not in self.pools:
            self.pools[size] = Ranks(size)
        return self.pools[size].run(function, on, *args)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    for pool in made.pools.values():
        pool.close()


@EVERY
@pytest.mark.parametrize(("family", "layout"), [("qwen3", "packed"), ("llama", "padded")])
def test_loss_and_gradients_equal_plain_transformers(
    pools: Pools, name: str, family: str, layout: str
) -> None:
    for step in pools.run(cases.one_step, LAYOUTS[name], family, layout):
        assert_same(step, plain_step(family, "token"))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "biased", "uneven"])
@pytest.mark.parametrize("name", ["tp2", "tp2dp2"])
def test_every_architecture_is_cut_rightly(pools: Pools, name: str, family: str) -> None:
    for step in pools.run(cases.one_step, LAYOUTS[name], family, "packed"):
        assert_same(step, plain_step(family, "token"))
    single = torch.tensor(cases.curve(fsdp2(), torch.float32, 4, None, family))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.float32, 4, None, family):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@EVERY
def test_pairs_that_share_their_prompt_equal_plain_transformers(
    pools: Pools, name: str, tmp_path: Path
) -> None:
    """Of two data ranks one would join its micro-batches for the reference at 50 tokens, both at 100."""
    store = make_pairs(tmp_path / "pairs")
    expected, logps = plain_dpo_step(store)
    for bound in (50, 100):
        seen = set()
        for step, found in pools.run(dpo_step, LAYOUTS[name], store.path, bound):
            assert_same(step, expected)
            for labels, values in found.items():
                torch.testing.assert_close(values, logps[labels], rtol=1e-5, atol=1e-5)
            seen |= found.keys()
        assert seen == logps.keys()


@EVERY
def test_the_curve_is_that_of_one_rank(pools: Pools, name: str) -> None:
    single = torch.tensor(cases.curve(fsdp2(), torch.float32))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.float32):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@EVERY
def test_bf16_follows_fp32(pools: Pools, name: str) -> None:
    single = torch.tensor(cases.curve(fsdp2(), torch.float32))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.bfloat16):
        assert torch.tensor(other) == pytest.approx(single, rel=3e-2)


@EVERY
def test_abort_leaves_no_trace(pools: Pools, name: str) -> None:
    expected = pools.run(cases.two_steps, LAYOUTS[name])
    aborted = pools.run(cases.two_steps_and_an_abort, LAYOUTS[name])
    for (unchanged, result, after), (straight, state) in zip(aborted, expected, strict=True):
        assert unchanged
        assert result == straight
        assert cases.identical(after, state)


@EVERY
def test_one_bad_rank_makes_all_skip(pools: Pools, name: str) -> None:
    layout = LAYOUTS[name]
    assert set(pools.run(cases.skip_when_one_rank_is_not_finite, layout, 0)) == {(True, True, True)}


@EVERY
def test_zeros_are_counted_once(pools: Pools, name: str) -> None:
    expected = cases.zeros_in_grad(fsdp2())
    assert expected
    assert set(pools.run(cases.zeros_in_grad, LAYOUTS[name])) == {expected}


@EVERY
def test_the_reference_is_frozen_and_evaluation_is_exact(pools: Pools, name: str) -> None:
    assert all(pools.run(cases.reference_logps, LAYOUTS[name]))
    expected = plain_step("qwen3", "token").loss
    for evaluated, _ in pools.run(cases.evaluate, LAYOUTS[name]):
        assert evaluated == pytest.approx(expected, rel=1e-5)


@EVERY
@pytest.mark.parametrize("other", ["one", "two"])
def test_a_checkpoint_crosses_layouts(pools: Pools, tmp_path: Path, name: str, other: str) -> None:
    """From this layout to another and back; the step after is that of the uninterrupted run."""
    there, back = LAYOUTS[name], fsdp2(1 if other == "one" else 2)
    for number, (written_on, read_on) in enumerate([(there, back), (back, there), (there, there)]):
        path = tmp_path / str(number)
        saved = pools.run(cases.save_after, written_on, 3, path)[0]
        uninterrupted = pools.run(cases.save_after, read_on, 4, tmp_path / f"{number}-straight")[0]
        for loaded, after in pools.run(cases.load_and_step, read_on, path, 3):
            assert cases.identical(loaded, saved)
            for key, expected in uninterrupted.items():
                torch.testing.assert_close(after[key], expected, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_goes_through_megatron_unchanged(pools: Pools, tmp_path: Path) -> None:
    """And the step after it is that of a run that never left FSDP2."""
    ours, through = tmp_path / "ours", tmp_path / "through"
    saved = pools.run(cases.save_after, LAYOUTS["tp2"], 3, ours)[0]
    with Ranks(2) as ranks:  # of their own: importing Megatron changes a process
        ranks.run(cases.load_and_save, megatron(tp=2), ours, through)
    uninterrupted = cases.save_after(fsdp2(), 4, tmp_path / "straight")
    for loaded, after in pools.run(cases.load_and_step, LAYOUTS["tp2"], through, 3):
        assert cases.identical(loaded, saved)
        for key, expected in uninterrupted.items():
            torch.testing.assert_close(after[key], expected, rtol=1e-4, atol=1e-6)


@EVERY
def test_an_export_is_read_by_transformers(pools: Pools, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    pools.run(cases.export, LAYOUTS[name], tmp_path)
    exported, reference = AutoModelForCausalLM.from_pretrained(tmp_path), plain_model("llama")
    for key, parameter in reference.named_parameters():
        assert torch.equal(exported.get_parameter(key), parameter), key


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("hsdp", {"dims": {"dp_replicate": 2, "dp_shard": 2, "tp": 1}, "ranks": [[[0], [1]], [[2], [3]]]}),
        ("copies", {"dims": {"dp_replicate": 2, "dp_shard": 1, "tp": 1}, "ranks": [[[0]], [[1]]]}),
        ("tp2dp2", {"dims": {"dp_replicate": 1, "dp_shard": 2, "tp": 2}, "ranks": [[[0, 1], [2, 3]]]}),
    ],
)
def test_the_mesh_is_described_and_weights_lie_on_it(pools: Pools, name: str, mesh: dict[str, Any]) -> None:
    for described, held in pools.run(cases.description, LAYOUTS[name]):
        assert described["mesh"] == mesh
        assert described["world_size"] == LAYOUTS[name].world_size({}, 0)
        parts = mesh["dims"]["dp_shard"] * mesh["dims"]["tp"]
        assert held == pytest.approx(described["parameters"] / parts, rel=0.02)
