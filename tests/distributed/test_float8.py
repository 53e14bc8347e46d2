"""``run.dtype=fp8`` computes what torchao's own layers compute in plain transformers.

Everything else is in fp32 here: rounding to bf16 in another order would change which values round up.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from schedulefree import AdamWScheduleFree

from components.engines.fsdp2 import FSDP2
from components.optimizers import Muon, Optimizer, TorchClass
from tests.distributed import float8_cases as cases
from tests.distributed.adapter_cases import continued, plain_adapter, trained
from tests.distributed.cases import assert_same, fsdp2, make_engine, plain_model
from tests.ranks import Ranks

TENSORWISE: dict[str, Any] = {"fp8_recipe": "tensorwise"}
GATHERED = TENSORWISE | {"fp8_all_gather": True}


@pytest.mark.parametrize(
    ("family", "on", "layout", "micro_batch"),
    [
        ("qwen3", fsdp2(**TENSORWISE), "packed", 1),
        ("biased", fsdp2(**GATHERED, activation_checkpointing="full"), "packed", 1),
        ("biased", fsdp2(), "padded", 4),
        ("qwen3_moe", fsdp2(fp8_recipe="rowwise_with_gw_hp"), "packed", 4),
    ],
)
def test_loss_and_gradients_equal_torchao(family: str, on: FSDP2, layout: str, micro_batch: int) -> None:
    """With scales of rows, micro-batches of four sequences give the result of one at a time."""
    expected = cases.plain(family, on.fp8_recipe)
    assert_same(cases.engine_step(on, family, layout, micro_batch), expected)


def test_layouts_of_two_ranks_equal_torchao() -> None:
    layouts = [
        fsdp2(2, **TENSORWISE, cpu_offload=True),
        fsdp2(2, **GATHERED),
        fsdp2(2, **GATHERED, dp_replicate=2),
        fsdp2(1, cp=2),
    ]
    for steps in Ranks(2).run(cases.engine_steps, layouts, "llama", seconds=120):
        for on, found in zip(layouts, steps, strict=True):
            assert_same(found, cases.plain("llama", on.fp8_recipe))


def test_four_ranks_in_two_copies_equal_torchao(tmp_path: Path) -> None:
    on, expected = fsdp2(4, **GATHERED, dp_replicate=2), cases.plain("llama", "tensorwise")
    for (found,) in Ranks(4).run(cases.engine_steps, [on], "llama"):
        assert_same(found, expected)
    for _, _, right in Ranks(4).run(cases.continued_in_bf16, on, tmp_path):
        assert right


def test_compiled_blocks_equal_torchao() -> None:
    expected = cases.plain("qwen3", "tensorwise")
    (found,) = Ranks(1).run(cases.compiled_step, fsdp2(**GATHERED), "qwen3", seconds=150)
    assert_same(found, expected)


def test_an_adapter_of_layers_in_float8_equals_peft_and_torchao(tmp_path: Path) -> None:
    plain_adapter("llama", "wide", tmp_path)
    model = PeftModel.from_pretrained(plain_model("llama", "sdpa"), tmp_path, is_trainable=True)
    expected = cases.plain_step(model, "tensorwise", trained(model))
    assert_same(cases.engine_step(fsdp2(**GATHERED), "llama", "packed", 1, continued(tmp_path)), expected)


@pytest.mark.parametrize("optimizer", [TorchClass(AdamWScheduleFree, 1e-2), Muon(1e-2, adamw_lr=1e-2)])
def test_scales_follow_every_change_of_the_weights(optimizer: Optimizer) -> None:
    """An optimizer that averages has other weights in an evaluation than in a step."""
    expected = cases.curve(fsdp2(**TENSORWISE), optimizer)
    assert cases.curve(fsdp2(**GATHERED), optimizer) == expected


def test_gathered_weights_are_rounded_as_whole_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    for straight, resumed, right in Ranks(2).run(cases.continued_in_bf16, fsdp2(2, **GATHERED), tmp_path):
        assert right
        assert straight.keys() == resumed.keys()
        assert [key for key, value in straight.items() if not torch.equal(value, resumed[key])] == []


@pytest.mark.parametrize(
    ("family", "layers", "left"),
    [
        ("qwen3_moe", 8, ["model.layers.*.mlp.experts"]),
        ("latent", 8, [f"model.layers.*.self_attn.{one}_proj" for one in ("kv_b", "o", "q_a", "q_b")]),
    ],
)
def test_what_stays_in_bf16_is_said(family: str, layers: int, left: list[str]) -> None:
    engine = make_engine(family, float8=True)
    described = engine.describe()["float8"]
    engine.close()
    assert (described["layers"], described["emulated"]) == (layers, True)
    assert described["in_bf16"] == left
