"""Offloaded activations are bitwise those that stay on the device, on both engines."""

from dataclasses import replace

import pytest

from tests.distributed.cases import fsdp2, megatron
from tests.distributed.compile_cases import without_cpp
from tests.distributed.offloading_cases import ADAPTED, HALF, Case, differences
from tests.ranks import Ranks

ONE: dict[str, Case] = {
    "fsdp2": (fsdp2(), "qwen3", {}),
    "fsdp2 full": (fsdp2(activation_checkpointing="full"), "llama", {}),
    "fsdp2 selective": (fsdp2(activation_checkpointing="selective"), "biased", HALF),
    "fsdp2 adapter": (fsdp2(), "llama", ADAPTED),
    "fsdp2 experts": (fsdp2(), "qwen3_moe", {}),
    "fsdp2 float8": (fsdp2(fp8_recipe="tensorwise", fp8_all_gather=True), "qwen3", {"float8": True, **HALF}),
    "megatron": (megatron(dp=1), "qwen3", {}),
    "megatron full": (megatron(dp=1, activation_checkpointing="full"), "llama", {}),
    "megatron selective": (megatron(dp=1, activation_checkpointing="selective"), "biased", HALF),
    "megatron adapter": (megatron(dp=1), "llama", ADAPTED),
    "megatron experts": (megatron(dp=1), "qwen3_moe", {}),
}
FOUR: dict[str, Case] = {
    "fsdp2 tp2": (fsdp2(2, tp=2), "llama", HALF),
    "fsdp2 cp2": (replace(fsdp2(2, cp=2), reshard_after_forward=False), "llama", {}),
    "fsdp2 ep2": (fsdp2(4, ep=2), "qwen3_moe", {}),
    "tp2 sp": (megatron(tp=2, sequence_parallel=True), "llama_four", {}),
    "pp2": (megatron(pp=2, activation_checkpointing="full"), "llama_four", {}),
    "pp2vpp2": (megatron(pp=2, vpp=2), "llama_four", HALF),
}


@pytest.mark.parametrize("name", ONE)
def test_nothing_changes(name: str) -> None:
    assert differences({name: ONE[name]}) == []


def test_nothing_changes_in_compiled_blocks() -> None:
    with without_cpp():
        assert differences({"compiled": (fsdp2(), "llama", {"compiled": True})}) == []


def test_nothing_changes_on_four_ranks(megatron_ranks: Ranks) -> None:
    assert megatron_ranks.run(differences, FOUR) == [[]] * 4
