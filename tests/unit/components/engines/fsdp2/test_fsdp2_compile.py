"""The right kernels are chosen, and fused kernels change neither results nor other models."""

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from components.contracts.errors import ConfigError
from components.engines.fsdp2 import compile
from tests.distributed.cases import spec


def model(family: str = "llama") -> PreTrainedModel:
    return spec(family).build(spec(family).config())


NEEDS_LIGER = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")


@pytest.mark.parametrize(
    ("asked", "device", "compiled", "known", "taken"),
    [
        ("auto", "cuda", False, True, "liger"),
        ("auto", "cuda", True, True, "torch"),
        ("auto", "cuda", False, False, "torch"),
        ("auto", "cpu", False, True, "tiled"),
        ("auto", "cpu", True, True, "torch"),
        ("torch", "cpu", False, True, "torch"),
        ("torch", "cuda", False, True, "torch"),
        ("liger", "cuda", True, True, "liger"),
    ],
)
def test_the_choice(asked: compile.Kernels, device: str, compiled: bool, known: bool, taken: str) -> None:
    with mock.patch.object(compile, "has_liger", return_value=known):
        assert compile.choose_kernels(asked, model(), device, compiled=compiled) == taken


def test_without_the_package_it_is_refused() -> None:
    with (
        mock.patch.object(compile, "find_spec", return_value=None),
        pytest.raises(ConfigError, match="pip install liger-kernel"),
    ):
        compile.check_liger(model(), "cuda")


def test_without_a_compiler_it_is_refused() -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"),
    ):
        compile.check(model(), "cpu", compiled=True, kernels="torch")


@pytest.mark.parametrize(
    ("family", "act", "usable"),
    [
        ("llama", "silu", {"swiglu"}),
        ("llama", "gelu", set()),
        ("phi3", "relu", set()),
        ("gemma", "gelu_pytorch_tanh", {"geglu"}),
        ("gemma", "gelu", set()),
    ],
)
def test_mlps_of_other_activations_are_not_fused(family: str, act: str, usable: set[str]) -> None:
    """Liger's MLPs ignore the activation of the configuration."""
    unlike = model(family)
    setattr(unlike.config, "hidden_activation" if family == "gemma" else "hidden_act", act)
    asked = asked_of_liger(unlike)
    assert {kind for kind in ("swiglu", "geglu") if asked[kind]} == usable
    options = {"rms_norm", "geglu" if family == "gemma" else "swiglu"}
    with (
        mock.patch.object(compile, "find_spec"),
        mock.patch.object(compile, "liger_options", return_value=options),
        nullcontext() if usable else pytest.raises(ConfigError, match=f"does not compute the .*{act} of"),
    ):
        compile.check_liger(unlike, "cuda")


def asked_of_liger(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of the call of Liger, which need not be installed."""
    liger = mock.Mock()
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    with mock.patch.dict(sys.modules, dict.fromkeys(names, liger)):
        compile.apply_liger(model)
    return dict(liger._apply_liger_kernel_to_instance.call_args.kwargs)


def test_of_a_reward_model_liger_gets_the_part_that_it_knows() -> None:
    with torch.device("meta"):
        causal = model()
        scored = LlamaForSequenceClassification(causal.config)
    assert asked_of_liger(scored)["model"] is scored.model
    assert asked_of_liger(causal)["model"] is causal


@NEEDS_LIGER
def test_models_that_liger_does_not_know() -> None:
    known = model("qwen3")
    assert compile.has_liger(known)
    known.config.model_type = "gpt_neox"
    with pytest.raises(ConfigError, match="does not support gpt_neox"):
        compile.check_liger(known, "cuda")


@NEEDS_LIGER
def test_code_of_the_users_own_keeps_its_blocks() -> None:
    with torch.device("meta"):
        own = type("OfOurOwn", (LlamaForCausalLM,), {"__module__": "my_models"})(model().config)
    assert not compile.has_liger(own)


@NEEDS_LIGER
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma", "phi3"])
def test_one_model_is_fused_and_no_other(family: str) -> None:
    fused = spec(family).build(spec(family).config())
    names = list(fused.state_dict())
    compile.apply_liger(fused)
    block = fused.model.layers[0]
    for module in (block.mlp, block.input_layernorm, fused.model.norm):
        assert is_bound(module)
    assert list(fused.state_dict()) == names
    other = spec(family).build(spec(family).config())
    assert "liger" not in type(other.model.norm).__module__
    assert not is_bound(other.model.norm)


def is_bound(module: torch.nn.Module) -> bool:
    """Return whether this instance has liger's forward."""
    return "liger" in getattr(vars(module).get("forward"), "__module__", "")
