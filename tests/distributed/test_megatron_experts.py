"""MoE models on the Megatron engine: gradients in every layout, capacity, checkpoints and exports."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.moe_loss_config import MoELossConfig
from tests.distributed import megatron_expert_cases as cases
from tests.distributed.cases import assert_same, fsdp2, megatron
from tests.distributed.expert_cases import Trained, Work, read, run
from tests.ranks import Ranks

TERMS = MoELossConfig("sequence", aux_loss_coef=0.1, z_loss_coef=0.02)
NONE = MoELossConfig()
SP = {"tp": 2, "sequence_parallel": True}
SHARDED = {"distributed_optimizer": True}
FULL = {"activation_checkpointing": "full"}
ALL = {"moe_token_dispatcher": "allgather"}

LAYOUTS: dict[str, tuple[Megatron, str, str]] = {
    "single": (megatron(dp=1), "qwen3_moe_mixed", "padded"),
    "tp2": (
        megatron(dp=1, bias_activation_fusion=True, gradient_accumulation_fusion=True, **SP),
        "qwen3_moe_mixed",
        "packed",
    ),
    "ep2": (megatron(dp=2, ep=2), "mixtral", "packed"),
    "ep2 allgather": (megatron(dp=2, ep=2, **ALL), "qwen3_moe_four", "padded"),
    "ep2 overlapped": (
        megatron(dp=2, ep=2, overlap_grad_reduce=True, overlap_param_gather=True, **SHARDED),
        "qwen3_moe_four",
        "packed",
    ),
    "etp2": (megatron(dp=2, etp=2), "mixtral", "packed"),
    "tp2ep2": (megatron(dp=1, ep=2, **SP), "deepseek", "packed"),
    "tp2ep2etp2": (megatron(dp=2, ep=2, etp=2, **SP), "qwen3_moe_four", "packed"),
    "tp2ep2etp2 in turn": (
        megatron(dp=2, ep=2, etp=2, moe_grouped_gemm=False, **SP),
        "qwen3_moe_four",
        "packed",
    ),
    "tp2ep2etp2 allgather": (megatron(dp=2, ep=2, etp=2, **SP, **ALL), "deepseek", "packed"),
    "pp2vpp2 full": (megatron(pp=2, vpp=2, dp=1, **FULL), "qwen3_moe_four", "packed"),
    "pp2ep2 sharded": (megatron(pp=2, dp=2, ep=2, **SHARDED), "qwen3_moe_four", "packed"),
    "cp2ep2 full": (megatron(cp=2, dp=1, ep=2, **FULL), "deepseek", "packed"),
    "tp2ep2 sharded": (megatron(dp=2, ep=2, **SP, **SHARDED), "mixtral", "padded"),
}


@pytest.fixture(scope="module")
def call() -> Callable[..., list[Any]]:
    """Return a function that calls ``function(layout, ...)`` on the ranks of a layout."""
    ranks = Ranks(4, megatron=True)

    def on_ranks(function: Callable[..., Any], on: FSDP2 | Megatron, *args: Any) -> list[Any]:
        size = on.world_size({}, 0)
        return [function(on, *args)] if size == 1 else ranks.run(function, on, *args, size=size)

    return on_ranks


plain_step = cache(cases.plain_step)
Call = Callable[..., list[Any]]


def work(family: str, layout: str = "packed", terms: MoELossConfig = TERMS, steps: int = 1) -> Work:
    return Work(family, layout, 2, steps, terms)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_plain_transformers(call: Call, name: str) -> None:
    on, family, layout = LAYOUTS[name]
    terms = NONE if family == "deepseek" else TERMS  # transformers has no loss for sigmoid scores
    expected, means = plain_step(family, terms)
    for found in call(run, on, work(family, layout, terms)):
        assert_same(found.first, expected)
        reported = {name: found.results[0].metrics[name] for name in means if terms is TERMS}
        assert reported == pytest.approx(means if terms is TERMS else {}, rel=1e-5)


@pytest.mark.parametrize("name", ["tp2ep2", "pp2vpp2 full", "tp2ep2etp2 allgather"])
def test_recomputed_experts_change_nothing(call: Call, name: str) -> None:
    """The router losses and loads are those of the first pass."""
    on, family, layout = LAYOUTS[name]
    modules = {"activation_checkpointing": "selective", "recompute_modules": ("core_attn", "mlp", "moe")}
    given = work(family, layout, steps=2)
    pairs = zip(
        call(run, replace(on, activation_checkpointing="none"), given),
        call(run, replace(on, **modules), given),
        strict=True,
    )
    for kept, again in pairs:
        assert kept.results == again.results
        names = kept.first.grads.keys()
        assert all(torch.equal(kept.first.grads[name], again.first.grads[name]) for name in names)


@pytest.mark.parametrize("name", ["tp2ep2", "cp2ep2 full", "tp2ep2etp2 allgather"])
def test_sigmoid_scores_and_biases_in_every_layout(call: Call, name: str) -> None:
    """Three steps are equal, after each of which the router biases change."""
    on, terms = LAYOUTS[name][0], replace(TERMS, bias_update_rate=0.05)
    trained: Trained = call(run, megatron(dp=1), work("deepseek", terms=terms, steps=3))[0]
    for found in call(run, on, work("deepseek", terms=terms, steps=3)):
        assert_same(found.first, trained.first)
        assert found.curve == pytest.approx(trained.curve, rel=1e-5)
    still = call(run, megatron(dp=1), work("deepseek", steps=3))[0]
    assert still.curve[1:] != pytest.approx(trained.curve[1:], rel=1e-5)


def test_experts_marked_as_megatron_marks_them_are_told(call: Call) -> None:
    """As a control, Megatron's marks give each tensor-parallel rank the gradients of only its own tokens."""
    on, family, layout = LAYOUTS["tp2"]
    (expected, _), (found, _) = plain_step(family, TERMS), call(cases.unmarked, on, work(family, layout))
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    assert (found.first.grads[name] - expected.grads[name]).norm() > 0.1 * expected.grads[name].norm()


@pytest.mark.parametrize("name", ["single", "ep2 allgather", "tp2ep2"])
def test_evaluations_and_logps_know_no_terms(call: Call, name: str) -> None:
    on, family, _ = LAYOUTS[name]
    for evaluated, scored, trained in call(cases.without_terms, on, work(family)):
        assert evaluated == pytest.approx(trained, rel=1e-6)
        assert scored == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("name", ["ep2", "cp2ep2 full"])
def test_an_aborted_step_leaves_nothing_to_routers(call: Call, name: str) -> None:
    on, family, _ = LAYOUTS[name]
    straight = call(run, on, work(family, steps=2))
    for losses, expected in zip(call(cases.aborted, on, work(family)), straight, strict=True):
        assert losses == [result.loss for result in expected.results]


def test_shared_experts_are_computed_while_tokens_travel(call: Call) -> None:
    on, done = LAYOUTS["tp2ep2"][0], work("deepseek", terms=NONE)
    expected, _ = plain_step("deepseek", NONE)
    for found in call(run, replace(on, shared_expert_overlap=True), done):
        assert_same(found.first, expected)


# ---- capacity


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize(
    ("policy", "pads"), [("probs", False), ("position", False), ("probs", True), ("position", True)]
)
def test_experts_over_capacity_keep_the_preferred_tokens(policy: str, pads: bool, padding: int) -> None:
    on = megatron(dp=1, capacity_factor=0.75, moe_token_drop_policy=policy, moe_pad_to_capacity=pads)
    room = 9  # 24 tokens x 2 choices / 4 experts x capacity factor 0.75
    weights, taken, their_weights, their_taken = cases.routed(on, "qwen3_moe", padding, room)
    torch.testing.assert_close(weights, their_weights)
    assert taken.sum(0).max() == room
    if pads and policy == "position":
        taken = taken & (weights > 0)  # without the tokens that only fill an expert up
    assert torch.equal(taken, their_taken)
    if not pads:
        assert not taken[24 - padding :].any()


def test_what_pads_experts_adds_nothing(call: Call) -> None:
    """Padded and all-gathered experts drop the same tokens: capacity is a fraction of the same row length."""
    on, done = replace(LAYOUTS["ep2"][0], capacity_factor=0.8), work("mixtral")
    (full, *_), (padded, *_) = (
        call(run, replace(on, **changes), done) for changes in (ALL, {"moe_pad_to_capacity": True})
    )
    assert_same(padded.first, full.first)
    assert padded.results[0].metrics["moe/dropped"] == full.results[0].metrics["moe/dropped"] > 0.01
    assert full.first.loss != pytest.approx(plain_step("mixtral", TERMS)[0].loss, rel=1e-5)


# ---- state


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3_moe_four", "pp2ep2 sharded", megatron(dp=1)),
        ("deepseek", "tp2ep2etp2 allgather", megatron(dp=2, ep=2, **SHARDED)),
        ("deepseek", "tp2ep2 sharded", LAYOUTS["cp2ep2 full"][0]),
        ("mixtral", "tp2ep2 sharded", fsdp2(2, ep=2)),
        ("mixtral", "tp2ep2etp2", fsdp2()),
        ("qwen3_moe_four", "tp2ep2etp2", megatron(dp=2, ep=2, moe_grouped_gemm=False)),
    ],
    ids=[
        "pp2ep2 to single",
        "etp2 to ep2",
        "tp2ep2 to cp2ep2",
        "tp2ep2 to fsdp2",
        "etp2 to fsdp2",
        "in turn",
    ],
)
def test_a_checkpoint_goes_on_in_any_layout(
    call: Call, tmp_path: Path, family: str, before: str, after: FSDP2 | Megatron
) -> None:
    terms = MoELossConfig(bias_update_rate=0.05) if family == "deepseek" else NONE
    on, done = LAYOUTS[before][0], work(family, terms=terms, steps=2)
    call(run, on, done, None, tmp_path / "written")
    again = call(run, after, replace(done, steps=0), tmp_path / "written/point", tmp_path / "read")
    assert len(again) == after.world_size({}, 0)
    written, loaded = read(tmp_path / "written/point"), read(tmp_path / "read/point")
    assert written.keys() == loaded.keys()
    assert all(torch.equal(written[key], loaded[key]) for key in written)
    if family == "deepseek":
        assert written["model/model.layers.2.mlp.gate.e_score_correction_bias"].abs().max() > 0.01
    assert_same_files(tmp_path / "written/export", tmp_path / "read/export")
    straight = call(run, megatron(dp=1), replace(done, steps=4))[0].curve
    for found in call(run, after, done, tmp_path / "written/point"):
        assert found.curve == pytest.approx(straight[2:], rel=1e-5)


def assert_same_files(one: Path, other: Path) -> None:
    """Assert that two exports have the same tensors, in whatever files they are."""
    first, second = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (one, other)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_export_is_its_source(call: Call, tmp_path: Path) -> None:
    """Exported untrained weights are bitwise the initial weights."""
    from tests.distributed.cases import spec

    on = LAYOUTS["tp2ep2etp2"][0]
    call(run, on, work("qwen3_moe_four", steps=0), None, tmp_path)
    found = {n: t for f in (tmp_path / "export").glob("*.safetensors") for n, t in load_file(f).items()}
    source = spec("qwen3_moe_four").weights(0)
    assert all(torch.equal(tensor, source(name)) for name, tensor in found.items())
    assert sum(".experts." in name for name in found) == 3 * 6 * 3
