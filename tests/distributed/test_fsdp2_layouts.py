"""Every layout of FSDP2 gives the results of one process."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from components.engines.fsdp2 import FSDP2
from tests.distributed import adapter_cases
from tests.distributed import engine_cases as cases
from tests.distributed.cases import assert_same, fsdp2, plain_model, plain_step
from tests.distributed.shared_prompt_cases import dpo_step, plain_dpo_step
from tests.pairs import make_pairs
from tests.ranks import Ranks

LAYOUTS = {
    "hsdp": fsdp2(4, dp_replicate=2, prefetch_groups=1),
    "copies": fsdp2(2, dp_replicate=2),
    "offload": fsdp2(2, cpu_offload=True),
    "every": fsdp2(2, reduce_gradients="every", blocks_per_group=2),
    "tp2": fsdp2(1, tp=2),
    "tp2dp2": fsdp2(2, tp=2),
    "cp2": fsdp2(1, cp=2),
}
EVERY = pytest.mark.parametrize("name", LAYOUTS)

COMBINED = {
    "hsdp tp2": fsdp2(2, dp_replicate=2, tp=2),
    "hsdp cp2": fsdp2(2, dp_replicate=2, cp=2),
    "tp2 offload": fsdp2(1, tp=2, cpu_offload=True),
    "cp2 offload": fsdp2(1, cp=2, cpu_offload=True),
    "cp2dp2": fsdp2(2, cp=2),
    "hsdp every offload": fsdp2(4, dp_replicate=2, cpu_offload=True, reduce_gradients="every"),
    "cp4": fsdp2(1, cp=4),  # more ranks than key-value heads
    "tp2cp2": fsdp2(1, cp=2, tp=2),  # one key-value head per rank
    "tp2cp2 full": fsdp2(1, cp=2, tp=2, activation_checkpointing="full"),
    "tp2cp2 selective offload": fsdp2(1, cp=2, tp=2, cpu_offload=True, activation_checkpointing="selective"),
}

step_of_transformers = cache(partial(plain_step, normalize="token"))
curve_of_one = cache(partial(cases.curve, fsdp2()))


class Pools:
    """Sets of ranks of any size."""

    def run(self, function: Callable[..., Any], on: FSDP2, *args: Any) -> list[Any]:
        """Call ``function(on, ...)`` on the ranks of the layout ``on`` and return the results by rank."""
        size = on.world_size({}, 0)
        return [function(on, *args)] if size == 1 else Ranks(size).run(function, on, *args)


@pytest.fixture(scope="module")
def pools() -> Pools:
    return Pools()


@EVERY
@pytest.mark.parametrize(("family", "layout"), [("qwen3", "packed"), ("llama", "padded")])
def test_loss_and_gradients_equal_plain_transformers(
    pools: Pools, name: str, family: str, layout: str
) -> None:
    for step in pools.run(cases.one_step, LAYOUTS[name], family, layout):
        assert_same(step, step_of_transformers(family))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma", "biased", "uneven"])
@pytest.mark.parametrize("name", ["tp2", "tp2dp2"])
def test_every_architecture_is_cut_rightly(pools: Pools, name: str, family: str) -> None:
    for step in pools.run(cases.one_step, LAYOUTS[name], family, "packed"):
        assert_same(step, step_of_transformers(family))
    single = torch.tensor(curve_of_one(torch.float32, 4, None, family))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.float32, 4, None, family):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@EVERY
def test_pairs_that_share_their_prompt_equal_plain_transformers(
    pools: Pools, name: str, tmp_path: Path
) -> None:
    """With a limit of 50 tokens, only one of two data-parallel ranks could merge its reference micro-batches.

    With 100 tokens, both could.
    """
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


ADAPTED = [
    ("copies", "llama", "saved", "padded"),
    ("offload", "qwen3", "dora", "packed"),
    ("tp2", "qwen3", "attention", "packed"),
    ("tp2dp2", "llama", "all", "padded"),
    ("cp2", "llama", "saved", "packed"),
    ("tp2cp2 full", "qwen3", "mlp", "packed"),
    ("tp2 offload", "biased", "all", "packed"),
    ("hsdp", "biased", "nf4", "packed"),
    ("cp2 offload", "llama", "nf4 saved", "padded"),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> adapter_cases.Plain:
    return adapter_cases.Plain(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(("name", "family", "kind", "layout"), ADAPTED)
def test_an_adapter_is_trained_as_by_plain_peft(
    pools: Pools, adapters: adapter_cases.Plain, name: str, family: str, kind: str, layout: str
) -> None:
    folder, expected = adapters(family, kind)
    on = (LAYOUTS | COMBINED)[name]
    for found in pools.run(adapter_cases.engine_steps, on, family, layout, folder, kind):
        adapter_cases.assert_equal(found, expected)


@pytest.mark.parametrize("name", ["copies", "offload", "every"])  # test_parity has the others
def test_the_curve_is_that_of_one_rank(pools: Pools, name: str) -> None:
    single = torch.tensor(curve_of_one(torch.float32))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.float32):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize(("family", "layout"), [("uneven", "packed"), ("llama", "padded")])
def test_layouts_combine(pools: Pools, name: str, family: str, layout: str) -> None:
    for step in pools.run(cases.one_step, COMBINED[name], family, layout):
        assert_same(step, step_of_transformers(family))


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("gemma", fsdp2(1, cp=2, tp=2, activation_checkpointing="full")),
        ("gemma", fsdp2(2, cp=2, activation_checkpointing="selective")),
        ("phi3", fsdp2(2, dp_replicate=2, cp=2)),
        ("phi3", fsdp2(1, cp=4, activation_checkpointing="full")),
    ],
    ids=["gemma tp2cp2 full", "gemma cp2dp2 selective", "phi3 hsdp cp2", "phi3 cp4 full"],
)
def test_other_architectures_in_other_layouts(pools: Pools, family: str, on: FSDP2) -> None:
    for step in pools.run(cases.one_step, on, family, "packed", 2):
        assert_same(step, step_of_transformers(family))


def test_a_share_of_a_row_is_enough(pools: Pools) -> None:
    expected = cases.shared_rows(fsdp2(), "gemma")
    for found in pools.run(cases.shared_rows, COMBINED["cp4"], "gemma"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@EVERY
def test_bf16_follows_fp32(pools: Pools, name: str) -> None:
    single = torch.tensor(curve_of_one(torch.float32))
    for other in pools.run(cases.curve, LAYOUTS[name], torch.bfloat16):
        assert torch.tensor(other) == pytest.approx(single, rel=3e-2)
        assert not torch.equal(torch.tensor(other), single)


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
    expected = step_of_transformers("qwen3").loss
    for evaluated, _ in pools.run(cases.evaluate, LAYOUTS[name]):
        assert evaluated == pytest.approx(expected, rel=1e-5)


@EVERY
def test_an_export_is_read_by_transformers(pools: Pools, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    pools.run(cases.export, LAYOUTS[name], tmp_path)
    exported, reference = AutoModelForCausalLM.from_pretrained(tmp_path), plain_model("llama")
    for key, parameter in reference.named_parameters():
        assert torch.equal(exported.get_parameter(key), parameter), key


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [
        ("hsdp", (2, 2, 1, 1), [[[[0]], [[1]]], [[[2]], [[3]]]]),
        ("copies", (2, 1, 1, 1), [[[[0]]], [[[1]]]]),
        ("tp2dp2", (1, 2, 1, 2), [[[[0, 1]], [[2, 3]]]]),
        ("tp2cp2", (1, 1, 2, 2), [[[[0, 1], [2, 3]]]]),
    ],
)
def test_the_mesh_is_described_and_weights_lie_on_it(
    pools: Pools, name: str, sizes: tuple[int, ...], ranks: list[Any]
) -> None:
    dims = dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))
    layout = (LAYOUTS | COMBINED)[name]
    for described, held in pools.run(cases.description, layout):
        assert described["mesh"] == {"dims": dims, "ranks": ranks}
        assert described["world_size"] == layout.world_size({}, 0)
        parts = dims["dp_shard"] * dims["cp"] * dims["tp"]
        assert held == pytest.approx(described["parameters"] / parts, rel=0.02)
