"""LoRA on the Megatron engine, in layouts of one and four ranks, against transformers, peft and torch."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from components.checkpoint.dcp import saved_keys
from tests.distributed import megatron_lora_cases as cases
from tests.distributed.cases import fsdp2, megatron, plain_model
from tests.ranks import Ranks

SHARDED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "dp4 sharded": megatron(**SHARDED),
    "tp2": megatron(tp=2, distributed_optimizer=True),
    "tp2 sp": megatron(tp=2, sequence_parallel=True, activation_checkpointing="full"),
    "pp2": megatron(pp=2, activation_checkpointing="selective"),
    "pp2vpp2": megatron(pp=2, vpp=2),
    "cp2": megatron(cp=2, **SHARDED),
    "tp2pp2": megatron(tp=2, pp=2, activation_checkpointing="full"),
}


ADAPTER = cases.warm()


@cache
def plain(family: str, stage: str) -> cases.Run:
    return cases.plain_train(family, ADAPTER, stage)


@pytest.fixture(scope="module")
def four(megatron_ranks: Ranks) -> Ranks:
    return megatron_ranks


def assert_same(run: cases.Run, expected: cases.Run) -> None:
    assert run.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        error = (run.grads[name] - grad).norm() / grad.norm()
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"
    ours, theirs = torch.tensor(run.curve), torch.tensor(expected.curve)
    assert ((ours - theirs).abs().amax(0) <= 1e-5 * theirs.abs().amax(0)).all(), f"{ours} {theirs}"


# qwen2_four has biases and a tied head, llama_four has neither.
CELLS = [
    ("dp4 sharded", "qwen2_four", "sft"),
    ("tp2", "qwen2_four", "sft"),
    ("tp2 sp", "llama_four", "sft"),
    ("pp2", "qwen2_four", "sft"),
    ("pp2vpp2", "llama_four", "sft"),
    ("cp2", "llama_four", "sft"),
    ("tp2pp2", "qwen2_four", "sft"),
    ("tp2pp2", "llama_four", "dpo"),
    ("pp2vpp2", "qwen2_four", "dpo"),
]


@pytest.mark.parametrize(("name", "family", "stage"), CELLS)
def test_gradients_and_curves_are_those_of_peft(four: Ranks, name: str, family: str, stage: str) -> None:
    expected = plain(family, stage)
    for run in four.run(cases.train, LAYOUTS[name], family, ADAPTER, stage):
        assert_same(run, expected)


@pytest.mark.parametrize("target", [("q_proj", "up_proj"), ("v_proj",), "mlp"], ids=str)
def test_any_part_of_a_fused_layer_may_be_adapted(target: Any) -> None:
    adapter = cases.warm(target, rslora=True)
    expected = cases.plain_train("qwen2_four", adapter, steps=2)
    assert_same(cases.train(megatron(dp=1), "qwen2_four", adapter, steps=2), expected)


# ---- checkpoints and exports of an adapter


@pytest.fixture(scope="module")
def life(four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[cases.Life]]:
    """Train, save and export an adapter on tp2pp2. Return its folder and the states of all ranks."""
    folder = tmp_path_factory.mktemp("adapter")
    return folder, four.run(cases.live, LAYOUTS["tp2pp2"], ADAPTER, folder)


def test_peft_loads_the_export(life: tuple[Path, list[cases.Life]]) -> None:
    folder, lives = life
    model = PeftModel.from_pretrained(plain_model("qwen2_four"), folder / "export")
    with torch.no_grad():
        adapted = cases.plain_sums(model, 0)
        with model.disable_adapter():
            before = cases.plain_sums(model, 0)
    answers = [made for made in lives if made.trained]
    assert answers
    for made in answers:
        assert torch.stack(made.trained).float() == pytest.approx(torch.stack(adapted), rel=1e-5)
        assert torch.stack(made.reference).float() == pytest.approx(torch.stack(before), rel=1e-5)
        assert torch.stack(made.reference) != pytest.approx(torch.stack(made.trained), rel=1e-2)


def test_the_base_takes_no_state_and_is_in_no_checkpoint(life: tuple[Path, list[cases.Life]]) -> None:
    folder, lives = life
    for made in lives:
        assert made.elements["buffers"] == made.elements["trained"]
        assert made.elements["state"] == 2 * made.elements["trained"]
    names = {key.partition("/")[2] for key in saved_keys(folder / "checkpoint") if key.startswith("model/")}
    stored = load_file(folder / "export" / "adapter_model.safetensors")
    assert names == {name.removeprefix("base_model.model.") for name in stored}
    assert all(".lora_" in name for name in names)
    total = sum(tensor.numel() for tensor in stored.values())
    assert {made.elements["described"] for made in lives} == {total}


def test_a_stage_may_have_nothing_to_train(four: Ranks, tmp_path: Path) -> None:
    """A stage without trained parameters runs its backward pass and update, and is saved and loaded."""
    adapter = cases.warm(("0.self_attn.v_proj", "0.mlp.down_proj"))
    written = four.run(cases.save_and_go_on, megatron(pp=2, **SHARDED), adapter, tmp_path)
    for on in (megatron(dp=1, pp=1), fsdp2()):
        assert torch.tensor(cases.go_on(on, adapter, tmp_path)) == pytest.approx(
            torch.tensor(written[0]), rel=1e-5
        )
    again = four.run(cases.go_on, LAYOUTS["pp2"], adapter, tmp_path)
    assert torch.tensor(again[0]) == pytest.approx(torch.tensor(written[0]), rel=1e-5)


def test_replicas_drop_the_same_after_a_resume_from_another_layout(four: Ranks, tmp_path: Path) -> None:
    cases.save_and_go_on(fsdp2(), ADAPTER, tmp_path)
    first, second = four.run(cases.resumed_with_dropout, LAYOUTS["tp2"], tmp_path / "checkpoint")[:2]
    assert len(first) > 1
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("name", ["tp2", "tp2 sp"])
def test_dropout_leaves_replicas_the_same(four: Ranks, name: str) -> None:
    """Replicas stay equal, such as the factor that both tp ranks hold. Evaluations use no dropout."""
    answers = four.run(cases.with_dropout, LAYOUTS[name], cases.warm(dropout=0.5))
    (first, losses), rest = answers[0], answers[1:]
    twins = 0
    for held, others in rest:
        assert others == losses
        for parameter, (index, values) in held.items():
            if index == first[parameter][0]:
                twins += 1
                assert torch.equal(values, first[parameter][1]), parameter
    assert twins >= 2 * len(first)  # all on the other dp rank, and one of two factors on each other rank
    trained, evaluated, again = losses
    assert trained != pytest.approx(plain("qwen2_four", "sft").curve[0][0], rel=1e-3)
    assert evaluated == again


# ---- model.freeze


@pytest.mark.parametrize(
    ("name", "family", "patterns"),
    [
        # A stage or a chunk has nothing to train, and the tied head is on another stage.
        ("pp2", "qwen2_four", ("model.layers.[01].*", "model.embed_tokens.*")),
        ("pp2vpp2", "qwen2_four", ("model.layers.[02].*", "model.norm.*")),
        ("pp2vpp2", "llama_four", ("model.layers.*", "model.embed_tokens.*", "lm_head.*")),
        ("tp2pp2", "llama_four", ("*.mlp.*", "lm_head.*", "model.embed_tokens.*")),
        ("dp4 sharded", "llama_four", ("model.layers.[012].*",)),
    ],
)
def test_a_part_of_a_model_is_trained(four: Ranks, name: str, family: str, patterns: tuple[str, ...]) -> None:
    expected = cases.plain_frozen(family, patterns)
    for run in four.run(cases.train_frozen, LAYOUTS[name], family, patterns):
        assert_same(run, expected)
        assert run.zeros[0] == expected.zeros[0]


def test_the_only_trained_part_is_the_rest_of_a_frozen_one(four: Ranks) -> None:
    """The names of ``train_only`` are those that the patterns of ``freeze`` leave, so both runs are equal."""
    only = ("model.layers.[13].*", "model.norm.*")
    frozen = ("model.layers.[02].*", "model.embed_tokens.*", "lm_head.*")
    expected, found = (
        four.run(cases.train_frozen, LAYOUTS["pp2"], "llama_four", *patterns)
        for patterns in ((frozen,), ((), only))
    )
    assert [run.curve for run in found] == [run.curve for run in expected]
    assert [run.grads.keys() for run in found] == [run.grads.keys() for run in expected]
