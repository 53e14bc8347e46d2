"""``run.dtype=fp8`` on Megatron: what is refused, and the options of Megatron and the forecast."""

from typing import Any

import pytest
import torch

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.megatron import Megatron
from components.engines.megatron.runtime.transformer_config import transformer_config
from components.models import ModelSpec
from components.optimizers import AdamW
from components.preflight.device_checks import check_float8
from tests.unit.components.engines.megatron.test_megatron_checks import SHAPE

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
MODEL = ModelSpec(architecture=SHAPE | SIZES)
ON_A_GPU = EngineOptions(torch.bfloat16, "cuda", float8=True)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.engines.megatron.checks.has_transformer_engine", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, None),
        ({"tp": 2, "fp8_recipe": "blockwise"}, None),
        ({"transformer_impl": "local"}, r"^parallelism\.transformer_impl: is local, .*run\.dtype=bf16\.$"),
        ({"tp": 4}, r"multiples of 16, and a rank has one of 24; use a smaller parallelism\.tp"),
        ({"cp": 2}, r"^run\.dtype: fp8 with Megatron .* cp_comm_type=all_gather; use parallelism=fsdp2"),
    ],
    ids=str,
)
def test_what_transformer_engine_cannot_do_is_refused(sizes: dict[str, Any], message: str | None) -> None:
    def check() -> None:
        layout = Megatron(**sizes)
        layout.check(MODEL.meta_model, AdamW(), ON_A_GPU, world_size=layout.model_ranks)

    if message is None:
        check()
    else:
        with pytest.raises(ConfigError, match=message):
            check()


def test_the_gpu_needs_products_of_the_recipe() -> None:
    check_float8("cuda", None, Megatron())
    check_float8("cuda", "B200", Megatron(fp8_recipe="mxfp8"))
    with pytest.raises(ConfigError, match=r"capability 10\.0 or above here .* which NVIDIA H100 is not"):
        check_float8("cuda", None, Megatron(fp8_recipe="mxfp8"))
    for name, recipe in (("H100", "mxfp8"), ("L40S", "blockwise"), ("A100", "tensorwise")):
        with pytest.raises(ConfigError, match=rf"which {name} is not"):
            check_float8("cuda", name, Megatron(fp8_recipe=recipe))


def test_without_transformer_engine_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.engines.megatron.checks.has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match=r"^run\.dtype: .*pip install transformer-engine\[pytorch\]"):
        Megatron().check(MODEL.meta_model, AdamW(), ON_A_GPU, world_size=1)


@pytest.mark.parametrize(
    ("recipe", "numbers"), [("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")]
)
def test_megatron_is_given_the_recipe(recipe: Any, numbers: str) -> None:
    options = EngineOptions(torch.bfloat16, "cpu", float8=True)
    config = transformer_config(MODEL.config(), Megatron(fp8_recipe=recipe), options)
    assert (config.fp8, config.fp8_recipe, config.bf16) == (numbers, recipe, True)
    plain = transformer_config(MODEL.config(), Megatron(), EngineOptions(torch.bfloat16, "cpu"))
    assert plain.fp8 is None
