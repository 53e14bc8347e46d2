"""The Megatron engine as a state machine, in layouts of one and two ranks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor

from components.adapters import LoRA
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.optimizers import SGD, AdamW, Muon, Optimizer, TorchClass, WeightGroup
from tests.distributed import engine_cases as cases
from tests.distributed import megatron_cases
from tests.distributed.cases import Step, assert_same, fsdp2, make_engine, megatron, plain_step
from tests.ranks import Ranks

Run = Callable[..., list[Any]]

OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "single": megatron(dp=1),
    "dp2": megatron(dp=2, gradient_accumulation_fusion=True, **OVERLAPPED),
    "tp2sp": megatron(tp=2, dp=1, sequence_parallel=True, gradient_accumulation_fusion=True),
    "cp2": megatron(cp=2, dp=1),
    "pp2": megatron(pp=2, dp=1),
}
# With a pipeline, only the last stage sees an error of the loss. The others wait until the run is ended.
WITHOUT_PIPELINE = [name for name, layout in LAYOUTS.items() if layout.pp == 1]


@pytest.fixture(scope="module")
def run(megatron_pair: Ranks) -> Run:
    """Return a function that calls ``function(layout, ...)`` on the ranks of a layout."""

    def call(function: Callable[..., Any], on: FSDP2 | Megatron, *args: Any) -> list[Any]:
        ranks = on.world_size({}, 0)
        return [function(on, *args)] if ranks == 1 else megatron_pair.run(function, on, *args)

    return call


@pytest.mark.parametrize(
    ("name", "detour"),
    [(name, cases.two_steps_and_an_abort) for name in LAYOUTS]
    + [(name, cases.two_steps_and_an_error) for name in WITHOUT_PIPELINE],
)
def test_abort_leaves_no_trace(run: Run, name: str, detour: Callable[..., Any]) -> None:
    expected = run(cases.two_steps, LAYOUTS[name])
    answers = run(detour, LAYOUTS[name])
    for (unchanged, result, after), (straight, state) in zip(answers, expected, strict=True):
        assert unchanged
        assert result == straight
        assert cases.identical(after, state)


@pytest.mark.parametrize(("fused", "number"), [(True, 4 * 2 * 4), (False, 0)])
def test_weight_gradients_are_accumulated_by_their_matmul(fused: bool, number: int) -> None:
    """Those of four matrices in each of two layers, for each of four micro-batches."""
    assert megatron_cases.num_accumulated(megatron(dp=1, gradient_accumulation_fusion=fused)) == number


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, AdamW(lr=1e-3)) for name in ("single", "dp2", "pp2")), ("single", Muon(lr=1e-3))],
    ids=["adamw", "adamw dp2", "adamw pp2", "muon"],
)
def test_a_trial_has_the_state_of_later_steps(run: Run, name: str, optimizer: Optimizer) -> None:
    for within, after, changed in run(cases.state_of_a_trial, LAYOUTS[name], optimizer):
        assert within == after > 0
        assert not changed


@pytest.mark.parametrize(
    ("on", "optimizer"),
    [
        (fsdp2(dp=2), AdamW(lr=1e-3)),
        (fsdp2(), TorchClass(AdamWScheduleFree, 1e-3)),
        (LAYOUTS["dp2"], AdamW(lr=1e-3)),
        (LAYOUTS["pp2"], AdamW(lr=1e-3)),
        (LAYOUTS["tp2sp"], Muon(lr=1e-3)),
    ],
    ids=["fsdp2", "averaged", "dp2", "pp2", "muon"],
)
def test_an_evaluation_loads_only_weights(
    run: Run, tmp_path: Path, on: FSDP2 | Megatron, optimizer: Optimizer
) -> None:
    for same, state in run(cases.loaded_for_evaluation, on, optimizer, tmp_path):
        assert same
        assert not state


def test_a_trial_with_a_class_that_keeps_no_state(run: Run) -> None:
    """Ranks of dp2 own weights that only the other one writes to a checkpoint."""
    found = run(cases.state_of_a_trial, LAYOUTS["dp2"], TorchClass(torch.optim.SGD, 1e-3))
    assert found == [(0, 0, False)] * 2


@pytest.mark.parametrize("name", ["single", "dp2"])
@pytest.mark.parametrize("adapter", [None, LoRA()], ids=["full", "lora"])
def test_no_weight_outlives_its_engine(run: Run, name: str, adapter: LoRA | None) -> None:
    for number, alive in run(cases.weights_after_the_end, LAYOUTS[name], adapter):
        assert number > 0
        assert alive == 0


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_bad_rank_makes_all_skip(run: Run, bad_rank: int) -> None:
    answers = run(cases.skip_when_one_rank_is_not_finite, LAYOUTS["dp2"], bad_rank)
    assert answers == [(True, True, True)] * 2


def test_a_bad_loss_on_the_last_stage_makes_all_skip(run: Run) -> None:
    answers = run(cases.skip_when_one_rank_is_not_finite, LAYOUTS["pp2"], 0)
    assert answers == [(True, True, True)] * 2


@pytest.mark.parametrize("name", ["tp2sp", "pp2"])
def test_a_loss_that_is_too_high_makes_all_skip(run: Run, name: str) -> None:
    assert set(run(cases.skip_when_the_loss_is_too_high, LAYOUTS[name])) == {(True, True, True)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_streamed_counts_and_many_calls(run: Run, name: str) -> None:
    many, one = (run(cases.streamed, LAYOUTS[name], calls) for calls in (True, False))
    assert all(result == many[0] for result in many), "every rank gets the same result"
    assert many[0].loss == pytest.approx(one[0].loss, rel=1e-6)
    assert many[0].grad_norm == pytest.approx(one[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_has_the_training_normalisation(run: Run, name: str) -> None:
    expected = plain_step("qwen3", "token").loss
    for evaluated, trained in run(cases.evaluate, LAYOUTS[name]):
        assert evaluated == pytest.approx(expected, rel=1e-5)
        assert trained == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", WITHOUT_PIPELINE)
def test_the_reference_is_frozen(run: Run, name: str) -> None:
    assert all(run(cases.reference_logps, LAYOUTS[name]))


@cache
def curve_of_fsdp2(dtype: torch.dtype) -> Tensor:
    return torch.tensor(cases.curve(fsdp2(), dtype))


@pytest.mark.parametrize("name", ["single", "dp2", "pp2"])
def test_bf16_follows_the_other_engine(run: Run, name: str) -> None:
    """bf16 weights with fp32 master weights and gradients act like FSDP2's fp32 shards computed in bf16."""
    exact, other = curve_of_fsdp2(torch.float32), curve_of_fsdp2(torch.bfloat16)
    for curve in run(cases.curve, LAYOUTS[name], torch.bfloat16):
        assert torch.tensor(curve) == pytest.approx(exact, rel=3e-2)
        assert torch.tensor(curve) == pytest.approx(other, rel=3e-2)
        assert not torch.equal(torch.tensor(curve), exact)


def test_sgd_follows_the_other_engine(run: Run) -> None:
    description = SGD(lr=1e-2, momentum=0.9, weight_decay=0.1, max_grad_norm=1.0)
    expected = torch.tensor(cases.curve(fsdp2(), torch.float32, optimizer=description))
    for name in ("single", "pp2"):
        for curve in run(cases.curve, LAYOUTS[name], torch.float32, 5, description):
            assert torch.tensor(curve) == pytest.approx(expected, rel=1e-5)


GROUPS = (
    WeightGroup("*.embed_tokens.*", lr=1e-4, weight_decay=0.0),
    WeightGroup("*norm*", weight_decay=0.3),
    WeightGroup("*.self_attn.*", lr=5e-3),
)


def test_groups_of_weights_follow_the_other_engine(run: Run) -> None:
    description = AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, groups=GROUPS)
    expected = torch.tensor(cases.curve(fsdp2(), torch.float32, optimizer=description))
    usual = torch.tensor(cases.curve(fsdp2(), torch.float32, optimizer=replace(description, groups=())))
    assert (expected[-1, 0] / usual[-1, 0] - 1).abs() > 1e-2
    sharded = replace(LAYOUTS["dp2"], distributed_optimizer=True)
    for layout in (LAYOUTS["tp2sp"], LAYOUTS["pp2"], sharded):
        for curve in run(cases.curve, layout, torch.float32, 5, description):
            assert torch.tensor(curve) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def kept(run: Run) -> Callable[[str], Step]:
    """Return a function that takes a step of rank 0 without recomputation, once per layout."""
    return cache(lambda name: run(megatron_cases.engine_step, LAYOUTS[name], "qwen3", "packed", 2)[0])


@pytest.mark.parametrize(
    ("recompute", "keys"),
    [
        ("full", {}),
        ("selective", {}),
        ("full", {"recompute_num_layers": 1}),
        ("selective", {"recompute_modules": ("mlp",)}),
        ("selective", {"recompute_modules": ("core_attn", "mlp")}),
    ],
    ids=str,
)
def test_recomputed_activations_change_nothing(
    run: Run, kept: Callable[[str], Step], recompute: Any, keys: dict[str, Any]
) -> None:
    for name in ("single", "tp2sp", "pp2"):
        plain = kept(name)
        on = replace(LAYOUTS[name], activation_checkpointing=recompute, **keys)
        again = run(megatron_cases.engine_step, on, "qwen3", "packed", 2)[0]
        assert again.loss == plain.loss
        assert all(torch.equal(again.grads[name], plain.grads[name]) for name in plain.grads)


@pytest.mark.parametrize("on", [fsdp2(), LAYOUTS["single"]], ids=["fsdp2", "megatron"])
@pytest.mark.parametrize(
    "trained",
    [{"train_only": ("*.mlp.*",)}, {"adapter": LoRA(target_modules=["gate_proj", "down_proj"])}],
    ids=["weights", "adapter"],
)
def test_mlps_with_a_frozen_input_are_recomputed(on: FSDP2 | Megatron, trained: dict[str, Any]) -> None:
    """Megatron recomputes only modules whose input requires a gradient."""
    again = replace(on, activation_checkpointing="selective", recompute_modules=("mlp",))
    plain, same = (megatron_cases.engine_step(each, "qwen3", "packed", 2, **trained) for each in (on, again))
    assert same.loss == plain.loss
    assert plain.grads.keys() == same.grads.keys()
    assert all(grad.any() or ".lora_A" in name for name, grad in same.grads.items())
    assert all(torch.equal(same.grads[name], plain.grads[name]) for name in plain.grads)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_embedding_of_the_padding_token_has_no_gradient(run: Run, name: str) -> None:
    """The token also occurs between others, as an end of text often does."""
    plain = plain_step("uneven", "token")
    assert not plain.grads["model.embed_tokens.weight"][5].any()
    for ours in run(megatron_cases.engine_step, LAYOUTS[name], "uneven", "packed", 2):
        assert_same(ours, plain)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zeros_are_counted_once(run: Run, name: str) -> None:
    grads = plain_step("llama", "token").grads
    expected = sum(int((g == 0).sum()) for g in grads.values())
    assert expected > 0  # embeddings of tokens that do not occur have zero gradients
    assert set(run(cases.zeros_in_grad, LAYOUTS[name])) == {expected}


def test_zeros_and_curves_do_not_see_padded_vocabulary(run: Run) -> None:
    """161 tokens on two tensor-parallel ranks need one row of padding, which has no effect."""
    single = run(megatron_cases.odd_vocabulary, fsdp2())[0]
    for answer in run(megatron_cases.odd_vocabulary, megatron(tp=2, dp=1)):
        assert answer == pytest.approx(single, rel=1e-6)


def test_the_order_of_calls_is_checked() -> None:
    cases.call_out_of_order(LAYOUTS["single"])


def test_a_failed_build_leaves_the_process_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "components.engines.megatron.runtime.engine.MegatronOptimizers.build", lambda *_: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            make_engine(on=LAYOUTS["single"])
    make_engine(on=LAYOUTS["single"]).close()
    make_engine().close()


@pytest.mark.parametrize(
    "sizes",
    [
        {"first_stage_layers": 2},
        {"last_stage_layers": 1},
        {"pipeline_layout": "Et|ttttL"},
        {"pipeline_layout": "Ett|t|t|tL", "vpp": 2},
    ],
    ids=str,
)
def test_stages_may_be_of_any_size(run: Run, sizes: dict[str, Any]) -> None:
    plain = plain_step("deep", "token")
    for ours in run(megatron_cases.engine_step, megatron(pp=2, dp=1, **sizes), "deep", "packed", 2):
        assert_same(ours, plain)


def test_the_head_is_gathered_before_it_is_read(run: Run) -> None:
    """The parameters of an untied head, or of a head on another stage, fill a separate bucket."""
    expected = torch.tensor(run(megatron_cases.three_steps, fsdp2(), "llama")[0])
    for curve in run(megatron_cases.three_steps, replace(LAYOUTS["dp2"], bucket_size=3000), "llama"):
        assert torch.tensor(curve) == pytest.approx(expected, rel=1e-5)


def test_data_ranks_share_out_a_checkpoint(run: Run) -> None:
    one, other = run(megatron_cases.kept_for_a_checkpoint, LAYOUTS["dp2"])
    (alone,) = run(megatron_cases.kept_for_a_checkpoint, LAYOUTS["single"])
    tensors = [{k: n for k, n in kept.items() if not k.startswith("rng")} for kept in (one, other, alone)]
    both = Counter(tensors[0]) + Counter(tensors[1])
    assert both.pop("optimizer_step") == 2, "a replica, which is written once"
    assert both == {key: n for key, n in tensors[2].items() if key != "optimizer_step"}
    smaller, larger = sorted(sum(kept.values()) for kept in tensors[:2])
    assert smaller > 0.9 * larger
    # A run may resume on a GPU, whose generators have another state.
    assert {key for key in alone if key.startswith("rng")} >= {"rng/0", "rng_cpu_model-parallel-rng/0"}
    assert not any("cuda" in key for key in alone)


def test_gradients_are_reduced_during_the_last_backward(run: Run) -> None:
    """Reductions overlap from the second step: in the first, Megatron counts the gradients of each bucket."""
    bucketed = replace(LAYOUTS["dp2"], bucket_size=2000)
    for first, second in run(megatron_cases.buckets_under_way, bucketed):
        assert first == 0
        assert second > 3


def test_the_mesh_is_what_the_ranks_say(run: Run) -> None:
    for described in run(megatron_cases.describe, LAYOUTS["pp2"]):
        assert described["mesh"] == {
            "dims": {"pp": 2, "dp": 1, "cp": 1, "tp": 1},
            "ranks": [[[[0]]], [[[1]]]],
        }
        assert described["engine"] == "megatron"
        assert described["world_size"] == 2


def test_ranks_agree_on_the_largest(run: Run) -> None:
    assert run(cases.largest_rank, LAYOUTS["pp2"]) == [11.0, 11.0]


@pytest.mark.parametrize("name", ["single", "dp2"])
def test_where_memory_ends_is_named(run: Run, name: str) -> None:
    """The error names the micro-batch, also if it is the last one, which has a separate pass with overlap."""
    for number in (2, 4):
        for said, total in run(cases.words_where_memory_ends, LAYOUTS[name], number):
            assert len(said) == 2
            for words in said:
                assert words.startswith(f"out of memory in micro-batch {number} of {total} (1 row, ")


def test_a_further_field_changes_the_model_in_the_same_way_in_every_layout(run: Run) -> None:
    """``glu_linear_offset`` is added to a factor of each MLP."""
    field = {"transformer_config": {"glu_linear_offset": 0.5}}
    (plain, _), (one, _) = (run(cases.two_steps, megatron(dp=1, **options))[0] for options in ({}, field))
    assert abs(one.loss / plain.loss - 1) > 1e-4
    for result, _ in run(cases.two_steps, megatron(tp=2, dp=1, **field)):
        assert result.loss == pytest.approx(one.loss, rel=1e-5)
