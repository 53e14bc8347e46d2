"""Multi-token prediction (MTP) in every layout, against a model built from transformers' modules."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models import named_shapes
from components.models.mtp import MTPConfig
from components.models.pretrained import stored_names
from tests.distributed import further_cases as cases
from tests.distributed.any_to_any_cases import assert_equal, read
from tests.distributed.cases import assert_same, fsdp2, megatron, spec
from tests.ranks import Ranks

LAYOUTS: dict[str, FSDP2 | Megatron] = {
    "fsdp2": fsdp2(2),
    "fsdp2 tp2": fsdp2(1, tp=2),
    "fsdp2 cp2": fsdp2(1, cp=2),
    "fsdp2 full": fsdp2(2, activation_checkpointing="full"),
    "fsdp2 cp2 selective": fsdp2(1, cp=2, activation_checkpointing="selective"),
    "megatron": megatron(),
    "tp2": megatron(tp=2),
    "tp2 sp full": megatron(tp=2, sequence_parallel=True, activation_checkpointing="full"),
    "pp2": megatron(pp=2),
    "cp2": megatron(cp=2),
    "cp2 a2a selective": megatron(cp=2, cp_comm_type="a2a", activation_checkpointing="selective"),
    "dp2 sharded": megatron(
        dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "pp2 uneven": megatron(pp=2, pipeline_layout="E|ttL"),
}


plain_step = cache(cases.plain_step)


def run(megatron_pair: Ranks, function: Any, on: FSDP2 | Megatron, *args: Any) -> list[Any]:
    return megatron_pair.run(function, on, *args) if on.world_size({}, 0) > 1 else [function(on, *args)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_plain_transformers(megatron_pair: Ranks, name: str, layout: str) -> None:
    for step, _ in run(megatron_pair, cases.one_step, LAYOUTS[name], "llama", layout, 2):
        assert_same(step, plain_step("llama"))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen2", "gemma"])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2 tp2"])
def test_every_family_is_plain_transformers(megatron_pair: Ranks, name: str, family: str) -> None:
    for step, _ in run(megatron_pair, cases.one_step, LAYOUTS[name], family, "packed"):
        assert_same(step, plain_step(family))


EXPERTS: dict[str, FSDP2 | Megatron] = {
    "fsdp2": fsdp2(2),
    "fsdp2 ep2": fsdp2(2, ep=2),
    "fsdp2 tp2": fsdp2(1, tp=2),
    "megatron": megatron(),
    "pp2": megatron(pp=2, last_stage_layers=1),
    "ep2": megatron(dp=2, ep=2),
    "tp2 sp ep2": megatron(tp=2, sequence_parallel=True, ep=2),
}


@pytest.mark.parametrize("family", ["qwen3_moe_mixed", "mixtral", "deepseek"])
@pytest.mark.parametrize("name", EXPERTS)
def test_layers_of_experts_are_plain_transformers(megatron_pair: Ranks, name: str, family: str) -> None:
    for step, _ in run(megatron_pair, cases.one_step, EXPERTS[name], family, "packed"):
        assert_same(step, plain_step(family))


@pytest.mark.parametrize("name", [name for name in EXPERTS if name != "fsdp2 tp2"])
def test_routers_of_further_layers_count_like_others(megatron_pair: Ranks, name: str) -> None:
    """Router losses and loads of all four MoE layers are equal in two steps, between which biases change."""
    expected = cases.routed(fsdp2())
    assert {f"moe/load_max/{layer}" for layer in range(4)} <= expected.keys()
    for found in run(megatron_pair, cases.routed, EXPERTS[name]):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen2"])
@pytest.mark.parametrize("name", ["megatron", "tp2"])
def test_every_family_of_megatron_is_plain_transformers(megatron_pair: Ranks, name: str, family: str) -> None:
    for step, _ in run(megatron_pair, cases.one_step, LAYOUTS[name], family, "packed"):
        assert_same(step, plain_step(family))


def test_chunks_of_stages_are_plain_transformers(megatron_pair: Ranks) -> None:
    for step, _ in run(megatron_pair, cases.one_step, megatron(pp=2, vpp=2), "llama_four", "packed"):
        assert_same(step, plain_step("llama_four"))


def test_chunks_of_stages_may_have_any_number_of_micro_batches(megatron_pair: Ranks) -> None:
    """Megatron's schedule gets a fourth one, of padding, which ends the reduction of every gradient."""
    single = torch.tensor(cases.curve(fsdp2(), "llama_four", 3))
    for other in run(megatron_pair, cases.curve, megatron(pp=2, vpp=2), "llama_four", 3):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_step_is_megatrons_own(family: str) -> None:
    """Gradients and main loss are those of Megatron's own model, label shifts and loss."""
    found, expected, loss, main = cases.megatrons_own(family)
    assert loss == pytest.approx(main, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("micro_batch", [8, 4, 1])
def test_a_micro_batch_of_any_size_is_the_same_step(micro_batch: int) -> None:
    step, metrics = cases.one_step(fsdp2(), "qwen3", "packed", micro_batch)
    assert_same(step, plain_step("qwen3"))
    means = [metrics[name] for name in ("lm_loss", "mtp_1_loss", "mtp_2_loss")]
    assert means == pytest.approx(cases.plain_means("qwen3"), rel=1e-5)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "full" not in n and "selective" not in n])
def test_the_curve_is_that_of_one_rank(megatron_pair: Ranks, name: str) -> None:
    single = torch.tensor(cases.curve(fsdp2(), "llama"))
    for other in run(megatron_pair, cases.curve, LAYOUTS[name], "llama"):
        assert torch.tensor(other) == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"), [("pp2", "fsdp2"), ("fsdp2 tp2", "pp2"), ("dp2 sharded", "tp2")]
)
def test_a_checkpoint_goes_on_in_another_layout(
    megatron_pair: Ranks, before: str, after: str, tmp_path: Path
) -> None:
    """Weights and moments are read bitwise as they were saved, and the losses continue."""
    for path in (tmp_path / "saved", tmp_path / "again"):
        path.mkdir()
    straight = run(megatron_pair, cases.saved, LAYOUTS[before], "llama", tmp_path / "saved")
    found = run(megatron_pair, cases.resumed, LAYOUTS[after], "llama", tmp_path / "saved", tmp_path / "again")
    assert torch.tensor(found) == pytest.approx(torch.tensor(straight), rel=1e-5)
    written = read(tmp_path / "saved")
    assert_equal(read(tmp_path / "again"), written)
    assert {f"{kind}/model.layers.3.eh_proj.weight" for kind in ("model", "exp_avg", "exp_avg_sq")} <= set(
        written
    )


@pytest.mark.parametrize("name", ["fsdp2 tp2", "pp2"])
def test_an_export_holds_every_layer(megatron_pair: Ranks, name: str, tmp_path: Path) -> None:
    run(megatron_pair, cases.exported, LAYOUTS[name], "llama", tmp_path)
    described = replace(spec("llama"), mtp=MTPConfig(cases.DEPTHS))
    weights, shapes = described.weights(0), named_shapes(described.build(described.config()))
    files = stored_names(tmp_path)
    assert files.keys() == shapes.keys()
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            assert torch.equal(file.get_tensor(name), weights(name)), name
