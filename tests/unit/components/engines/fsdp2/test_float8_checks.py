"""Checks of the machine for ``run.dtype=fp8``. Those of options are in tests/conf."""

import pytest
import torch

from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2, float8
from components.models import ModelSpec
from components.preflight.device_checks import check_float8
from tests.unit.components.models.test_models import TINY


def test_torchao_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(architecture=TINY).meta_model
    float8.check(model, FSDP2(), None, 1)
    monkeypatch.setattr(float8, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"run\.dtype: fp8 needs torchao.*pip install torchao"):
        float8.check(model, FSDP2(), None, 1)


def test_experts_do_not_compute_in_float8() -> None:
    """Neither are their rows gathered in float8, nor are they enough for a run in float8."""
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48, "hidden_size": 32}
    model = ModelSpec(architecture=TINY | experts | {"head_dim": 16}).meta_model
    gathered = FSDP2(fp8_recipe="tensorwise", fp8_all_gather=True)
    float8.check(model, gathered, None, 32)
    with pytest.raises(ConfigError, match=r"fp8_all_gather: 64 ranks .* the 32 rows"):
        float8.check(model, gathered, None, 64)
    model = ModelSpec(architecture=TINY | experts | {"head_dim": 6}).meta_model
    with pytest.raises(ConfigError, match=r"run\.dtype: fp8 needs linear layers .* this model has none"):
        float8.check(model, FSDP2(), None, 1)


def test_the_gpu_needs_products_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8("cpu", None, FSDP2())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    check_float8("cuda", "H100", FSDP2())
    with pytest.raises(ConfigError, match=r"which NVIDIA A100 is not; use run\.dtype=bf16"):
        check_float8("cuda", None, FSDP2())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_float8("cuda", None, FSDP2())
