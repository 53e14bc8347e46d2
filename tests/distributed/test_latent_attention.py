"""Multi-head latent attention (DeepSeek-V3) on both engines, against transformers on single sequences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed import further_cases, latent_cases, megatron_cases
from tests.distributed import megatron_lora_cases as lora
from tests.distributed.cases import Step, assert_same, fsdp2, megatron, plain_model, plain_step
from tests.distributed.test_megatron_lora import assert_same as assert_same_run
from tests.ranks import Ranks

Layout = FSDP2 | Megatron
Run = Callable[..., list[Any]]

ADAPTER = lora.warm("attention")
FAMILIES = ("latent", "latent_whole", "latent_yarn")
SHARDED: dict[str, FSDP2] = {
    "single": fsdp2(),
    "dp2": fsdp2(2),
    "tp2": fsdp2(1, tp=2),
    "tp2dp2": fsdp2(2, tp=2),
    "cp2": fsdp2(1, cp=2),
    "tp2cp2": fsdp2(1, cp=2, tp=2, activation_checkpointing="selective"),
}


@pytest.fixture
def run(megatron_ranks: Ranks) -> Run:
    """Return a function that calls ``function(layout, ...)`` on the ranks of a layout."""

    def call(function: Callable[..., Any], on: Layout, *args: Any) -> list[Any]:
        size = on.world_size({}, 0)
        return [function(on, *args)] if size == 1 else megatron_ranks.run(function, on, *args, size=size)

    return call


@pytest.fixture(scope="module")
def plain() -> dict[str, Step]:
    return {family: plain_step(family, "token") for family in FAMILIES}


@pytest.fixture(scope="module")
def peft() -> lora.Run:
    return lora.plain_train("latent", ADAPTER, steps=3)


def cells(every: list[str], some: list[str]) -> list[tuple[str, str]]:
    """Return pairs (layout, family): one family in all layouts, and the others in some."""
    return [(name, "latent") for name in every] + [(name, other) for name in some for other in FAMILIES[1:]]


@pytest.mark.parametrize(("name", "family"), cells([*SHARDED], ["single", "tp2cp2"]))
def test_fsdp2_equals_plain_transformers(run: Run, plain: dict[str, Step], name: str, family: str) -> None:
    layout = "padded" if family == "latent_whole" else "packed"
    for step in run(megatron_cases.engine_step, SHARDED[name], family, layout, 2):
        assert_same(step, plain[family])


MEGATRON: dict[str, Megatron] = {
    "single": megatron(dp=1),
    "dp2": megatron(dp=2, distributed_optimizer=True),
    "tp2": megatron(tp=2, dp=1),
    "tp2sp": megatron(tp=2, dp=1, sequence_parallel=True),
    "pp2": megatron(pp=2, dp=1),
    "cp2": megatron(cp=2, dp=1),
    "cp2 a2a": megatron(cp=2, dp=1, cp_comm_type="a2a"),
    "tp2cp2 a2a": megatron(tp=2, cp=2, dp=1, cp_comm_type="a2a", activation_checkpointing="selective"),
    "tp2pp2 sp": megatron(tp=2, pp=2, dp=1, sequence_parallel=True, activation_checkpointing="full"),
}


@pytest.mark.parametrize(("name", "family"), cells([*MEGATRON], ["single", "tp2cp2 a2a", "tp2pp2 sp"]))
def test_megatron_equals_plain_transformers(run: Run, plain: dict[str, Step], name: str, family: str) -> None:
    layout = "padded" if family == "latent_whole" else "packed"
    for step in run(megatron_cases.engine_step, MEGATRON[name], family, layout, 2):
        assert_same(step, plain[family])


ADAPTED: dict[str, Layout] = {
    "fsdp2_tp2": SHARDED["tp2"],
    "single": MEGATRON["single"],
    "tp2": MEGATRON["tp2"],
    "tp2sp": MEGATRON["tp2sp"],
}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_of_latents_is_trained_as_by_peft(run: Run, peft: lora.Run, name: str) -> None:
    for found in run(lora.train, ADAPTED[name], "latent", ADAPTER, "sft", 3):
        assert_same_run(found, peft)


@pytest.mark.parametrize("name", ["fsdp2_tp2", "tp2sp", "pp2", "cp2"])
def test_latents_predict_further_tokens(run: Run, name: str) -> None:
    expected = further_cases.plain_step("latent")
    for step, _ in run(further_cases.one_step, (ADAPTED | MEGATRON)[name], "latent", "packed", 2):
        assert_same(step, expected)


def test_experts_behind_latents_equal_plain_transformers(run: Run) -> None:
    expected = plain_step("deepseek", "token")
    on = megatron(cp=2, ep=2, dp=1, cp_comm_type="a2a")
    for step in run(megatron_cases.engine_step, on, "deepseek", "packed", 2):
        assert_same(step, expected)


MOVES = [("tp2sp", "fsdp2_tp2"), ("fsdp2_tp2", "pp2"), ("pp2", "cp2 a2a")]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_weights_and_moments_move_between_layouts(run: Run, tmp_path: Path, before: str, after: str) -> None:
    layouts = MEGATRON | ADAPTED
    (expected, *_) = run(latent_cases.leave, layouts[before], "latent", tmp_path)
    for curve in run(latent_cases.go_on, layouts[after], "latent", tmp_path):
        assert torch.tensor(curve) == pytest.approx(torch.tensor(expected), rel=1e-5)
    exported, plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export"), plain_model("latent")
    for name, parameter in plain.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name
