"""LoRA on experts with both engines, against transformers' model with the adapter added to its weights."""

from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed import expert_lora_cases as cases
from tests.distributed.cases import fsdp2, megatron, plain_model, sequences
from tests.distributed.expert_lora_cases import ADAPTER
from tests.distributed.megatron_lora_cases import Run, plain_sums, train, warm
from tests.distributed.test_megatron_lora import assert_same
from tests.ranks import Ranks

LAYOUTS: dict[str, FSDP2 | Megatron] = {
    "fsdp2": fsdp2(4),
    "fsdp2 ep2": fsdp2(4, ep=2),
    "fsdp2 ep4 full": fsdp2(4, ep=4, activation_checkpointing="full"),
    "ep2": megatron(dp=4, ep=2, distributed_optimizer=True),
    "ep4": megatron(dp=4, ep=4),
    "tp2 sp ep2": megatron(tp=2, dp=2, ep=2, sequence_parallel=True),
    "pp2 ep2": megatron(pp=2, dp=2, ep=2, activation_checkpointing="full"),
}


@cache
def plain(family: str, stage: str) -> Run:
    return cases.plain_train(family, ADAPTER, stage)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek"])
def test_one_process(family: str) -> None:
    assert_same(train(fsdp2(), family, ADAPTER, steps=3), plain(family, "sft"))


@pytest.mark.parametrize("target", ["mlp", "attention", ("down_proj",), ("gate_proj", "up_proj", "q_proj")])
def test_any_layers_of_experts(target: str) -> None:
    adapter = warm(target)
    expected = cases.plain_train("qwen3_moe", adapter, steps=2)
    assert_same(train(fsdp2(), "qwen3_moe", adapter, steps=2), expected)
    assert_same(train(megatron(dp=1), "qwen3_moe", adapter, steps=2), expected)


@pytest.mark.parametrize(
    ("name", "family", "stage"),
    [
        ("fsdp2", "qwen3_moe", "sft"),
        ("fsdp2 ep2", "qwen3_moe", "sft"),
        ("fsdp2 ep2", "deepseek", "dpo"),
        ("fsdp2 ep4 full", "mixtral", "sft"),
        ("ep2", "qwen3_moe", "sft"),
        ("ep4", "mixtral", "dpo"),
        ("tp2 sp ep2", "qwen3_moe", "sft"),
        ("pp2 ep2", "qwen3_moe", "sft"),
    ],
)
def test_gradients_and_curves(megatron_ranks: Ranks, name: str, family: str, stage: str) -> None:
    expected = plain(family, stage)
    for run in megatron_ranks.run(train, LAYOUTS[name], family, ADAPTER, stage, 3):
        assert_same(run, expected)


@pytest.mark.parametrize("name", ["fsdp2 ep2", "ep2"])
def test_any_layout_goes_on(megatron_ranks: Ranks, name: str, tmp_path: Path) -> None:
    found = megatron_ranks.run(cases.save, LAYOUTS[name], "qwen3_moe", ADAPTER, tmp_path)
    expected = torch.stack(found[0][2])
    for on in (fsdp2(), megatron(dp=1)):
        after = torch.tensor(cases.go_on(on, "qwen3_moe", ADAPTER, tmp_path))
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("on", [fsdp2(), megatron(dp=1)], ids=["fsdp2", "megatron"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek"])
def test_peft_reads_what_is_exported(on: FSDP2 | Megatron, family: str, tmp_path: Path) -> None:
    ours, reference, _ = cases.save(on, family, ADAPTER, tmp_path)
    model = PeftModel.from_pretrained(plain_model(family), tmp_path / "export").eval()
    with torch.no_grad():
        theirs = plain_sums(model, 0)
        without = plain_sums(plain_model(family), 0)
    assert len(ours) == len(sequences())
    torch.testing.assert_close(torch.stack(ours).float(), torch.stack(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack(reference).float(), torch.stack(without), rtol=1e-5, atol=1e-5)
