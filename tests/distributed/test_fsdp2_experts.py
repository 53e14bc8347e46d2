"""MoE models on FSDP2 have the gradients of plain transformers and the same curve in every layout."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.engines.fsdp2 import FSDP2
from components.models.experts import unstack_experts
from components.models.moe_loss_config import MoELossConfig
from tests.distributed.cases import assert_same, fsdp2, plain_model, plain_step
from tests.distributed.expert_cases import (
    Trained,
    Work,
    other_passes,
    read,
    reduces_in_place,
    run,
    watch_routers,
)
from tests.distributed.test_fsdp2_layouts import Pools

LAYOUTS = {
    "dp2": fsdp2(2),
    "ep2": fsdp2(2, ep=2),
    "tp2": fsdp2(1, tp=2),
    "cp2ep2": fsdp2(1, cp=2, ep=2),
    "dp4ep2": fsdp2(4, ep=2, prefetch_groups=1),
    "ep4": fsdp2(4, ep=4),
    "tp2ep2": fsdp2(2, tp=2, ep=2),
    "hsdp ep2": fsdp2(4, dp_replicate=2, ep=2),
}
COMBINED = {
    "ep2 full": fsdp2(2, ep=2, activation_checkpointing="full"),
    "ep2 selective offload": fsdp2(2, ep=2, activation_checkpointing="selective", cpu_offload=True),
    "ep2 modules": fsdp2(
        2,
        ep=2,
        activation_checkpointing="selective",
        recompute_modules=("core_attn", "mlp", "moe"),
        reduce_gradients="every",
    ),
    "tp2ep2 full": fsdp2(2, tp=2, ep=2, activation_checkpointing="full"),
    "dp4": fsdp2(4),
    "cp2 tp2": fsdp2(1, cp=2, tp=2),
}
"""More layouts. Six experts cannot be split over four ranks, which split the hidden dimension instead."""


@pytest.fixture(scope="module")
def pools() -> Pools:
    return Pools()


@cache
def single(work: Work) -> Trained:
    return run(fsdp2(), work)


def assert_as_one_process(found: Trained, expected: Trained) -> None:
    assert_same(found.first, expected.first)
    assert found.curve == pytest.approx(expected.curve, rel=1e-5)
    assert found.biases.keys() == expected.biases.keys()
    for name, bias in expected.biases.items():
        torch.testing.assert_close(found.biases[name], bias)
    for result, other in zip(found.results, expected.results, strict=True):
        assert result.metrics == pytest.approx(other.metrics, rel=1e-5)


SWITCH = MoELossConfig("switch", 0.1, z_loss_coef=0.01)
SEQUENCE = MoELossConfig("sequence", 0.1, z_loss_coef=0.01)
BIASED = replace(SEQUENCE, bias_update_rate=0.01)
GLOBAL = MoELossConfig("global_batch", 0.1)
ORACLE = {
    "qwen3_moe": MoELossConfig(),
    "qwen3_moe_mixed": SWITCH,
    "mixtral": SEQUENCE,
    "deepseek": BIASED,
}


@pytest.mark.parametrize("family", ORACLE)
def test_one_process_computes_what_transformers_does(family: str) -> None:
    terms = ORACLE[family]
    expected = plain_step(family, "token", partial(watch_routers, terms))
    assert_same(single(Work(family, terms=terms)).first, expected)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("dp2", Work("qwen3_moe_mixed", terms=SWITCH)),
        ("ep2", Work("qwen3_moe_mixed", terms=SWITCH)),
        ("ep2", Work("deepseek", "padded", 2, terms=BIASED)),
        ("tp2", Work("deepseek", terms=BIASED)),
        ("tp2", Work("qwen3_moe_mixed", terms=SWITCH)),
        ("cp2ep2", Work("mixtral", "padded", 2, terms=SEQUENCE)),
        ("cp2ep2", Work("qwen3_moe_mixed", terms=GLOBAL)),
        ("dp4ep2", Work("deepseek", terms=BIASED)),
        ("ep4", Work("mixtral", terms=SWITCH)),
        ("tp2ep2", Work("mixtral", "padded", terms=SWITCH)),
        ("tp2ep2", Work("deepseek", "packed", 2, terms=BIASED)),
        ("hsdp ep2", Work("qwen3_moe_mixed", "padded", terms=SEQUENCE)),
        ("cp2 tp2", Work("deepseek", terms=BIASED)),
        ("dp4", Work("qwen3_moe_mixed", terms=SWITCH)),
        ("ep2 full", Work("deepseek", terms=BIASED)),
        ("ep2 modules", Work("deepseek", terms=BIASED)),
        ("ep2 selective offload", Work("deepseek", terms=BIASED)),
        ("tp2ep2 full", Work("qwen3_moe_mixed", terms=SWITCH)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.family} {value.terms.aux_loss}",
)
def test_every_layout_trains_experts_as_one_process_does(pools: Pools, name: str, work: Work) -> None:
    for found in pools.run(run, (LAYOUTS | COMBINED)[name], work):
        assert_as_one_process(found, single(work))


def test_gradients_of_experts_on_one_data_rank_are_not_copied(pools: Pools) -> None:
    assert pools.run(reduces_in_place, LAYOUTS["ep2"]) == [True] * 2
    assert pools.run(reduces_in_place, LAYOUTS["hsdp ep2"]) == [False] * 4


def test_the_balance_of_the_global_batch_is_that_of_the_same_data_ranks(pools: Pools) -> None:
    """The load of earlier micro-batches depends only on the number of data-parallel ranks."""
    work = Work("deepseek", terms=replace(GLOBAL, bias_update_rate=0.01))
    expected = pools.run(run, LAYOUTS["dp2"], work)[0]
    for found in pools.run(run, COMBINED["ep2 full"], work):
        assert_as_one_process(found, expected)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3_moe_mixed", LAYOUTS["dp4ep2"], fsdp2()),
        ("qwen3_moe_mixed", LAYOUTS["ep2"], COMBINED["dp4"]),
        ("mixtral", fsdp2(), LAYOUTS["tp2ep2"]),
        ("mixtral", LAYOUTS["hsdp ep2"], LAYOUTS["tp2"]),
    ],
    ids=["dp4ep2 to single", "ep2 to dp4", "single to tp2ep2", "hsdp ep2 to tp2"],
)
def test_a_checkpoint_goes_on_in_any_layout(
    pools: Pools, tmp_path: Path, family: str, before: FSDP2, after: FSDP2
) -> None:
    for folder, on, steps, load in (
        (tmp_path / "written", before, 2, None),
        (tmp_path / "read", after, 0, tmp_path / "written" / "point"),
    ):
        pools.run(run, on, Work(family, steps=steps), load, folder)
    written, loaded = read(tmp_path / "written" / "point"), read(tmp_path / "read" / "point")
    assert written.keys() == loaded.keys()
    assert all(torch.equal(written[key], loaded[key]) for key in written)
    names = {name for name, _ in unstack_experts(plain_model(family).named_parameters())}
    assert {key.removeprefix("model/") for key in written if key.startswith("model/")} == names
    straight = run(fsdp2(), Work(family, steps=4)).curve
    for found in pools.run(run, after, Work(family, steps=2), tmp_path / "written" / "point"):
        assert found.curve == pytest.approx(straight[2:], rel=1e-5)


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "dp4ep2"), ("mixtral", "tp2ep2")])
def test_an_export_with_experts_is_read_by_transformers(
    pools: Pools, tmp_path: Path, family: str, name: str
) -> None:
    pools.run(run, LAYOUTS[name], Work(family, steps=0), None, tmp_path)
    exported, reference = AutoModelForCausalLM.from_pretrained(tmp_path / "export"), plain_model(family)
    for key, parameter in reference.named_parameters():
        assert torch.equal(exported.get_parameter(key), parameter), key


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_micro_batches_and_padding_change_nothing(layout: str) -> None:
    """Means over tokens or sequences do not change; a balance over a micro-batch would."""
    expected = single(Work("deepseek", "packed", 1, 2, BIASED))
    for size in (2, 4):
        assert_as_one_process(single(Work("deepseek", layout, size, 2, BIASED)), expected)


@pytest.mark.parametrize("name", ["single", "tp2ep2 full"])
def test_only_an_update_counts(pools: Pools, name: str) -> None:
    on = fsdp2() if name == "single" else COMBINED[name]
    for found in pools.run(other_passes, on, Work("deepseek", terms=BIASED)):
        assert found.undisturbed == found.straight
        assert found.skipped_changes == 0
        assert found.evaluated == pytest.approx(found.main, rel=1e-5)
        assert found.main < found.straight[0]
