"""Checks of torch.compile and of Liger's fused kernels for decoder blocks, and the choice of kernels."""

import inspect
import sys
from collections.abc import Set
from importlib.util import find_spec
from typing import Literal

from transformers import PreTrainedModel

from components.contracts.device import DeviceKind
from components.contracts.engine import Kernels
from components.contracts.errors import ConfigError
from components.engines.fsdp2.grouped_experts import grouped_experts
from components.engines.fsdp2.tiled_norm import has_replaceable_norms
from components.engines.shared.torch_private import has_cpp_compiler
from components.models.experts import moe_blocks
from components.models.scalar_head import has_scalar_head

ChosenKernels = Literal["torch", "liger", "tiled"]
"""Kernels of the norms and MLPs of a model: those of torch, those of Liger, or those of torch with
``tiled_norm``, on a CPU."""

LIGER_MLPS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""Kind of Liger's MLPs -> the activations that it computes, whatever activation the model has."""


def check(model: PreTrainedModel, device: DeviceKind, *, compiled: bool, kernels: Kernels) -> None:
    """Check that this machine can compile ``model`` and run it with the requested kernels.

    Raises:
        ConfigError: if compiling on the CPU lacks a C++ compiler; or if Liger's kernels are requested without
            a GPU, without liger-kernel, or for a model that they do not support.
    """
    if compiled and device == "cpu" and not has_cpp_compiler():
        raise ConfigError(
            "run.compile: needs a C++ compiler on the CPU and finds none; install g++ or clang, set CXX, "
            "or use run.compile=false."
        )
    if kernels == "liger":
        check_liger(model, device)


def check_liger(model: PreTrainedModel, device: DeviceKind) -> None:
    if device == "cpu":
        raise ConfigError("run.kernels: liger needs a GPU; use run.kernels=auto, or run.kernels=torch.")
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            "run.kernels: liger-kernel is not installed; pip install liger-kernel, or use run.kernels=torch."
        )
    if not has_liger(model):
        kind = f"{model.config.model_type} ({type(model).__name__})"
        raise ConfigError(f"run.kernels: liger-kernel does not support {kind}; use run.kernels=torch.")
    unlike = liger_options(model) & {kind for kind, same in liger_mlps(model).items() if not same}
    if unlike and not moe_blocks(model):  # MLPs of models with experts are not replaced
        raise ConfigError(
            f"run.kernels: the {min(unlike)} of liger-kernel does not compute the activation "
            f"{activation(model)} of {model.config.model_type}; use run.kernels=auto, or run.kernels=torch."
        )


def has_liger(model: PreTrainedModel) -> bool:
    return "rms_norm" in liger_options(model)


def liger_options(model: PreTrainedModel) -> Set[str]:
    """Return the names of the kernels that Liger has for ``model``; empty if it does not know the model."""
    # The module is checked too, because custom code may use the model type llama.
    if find_spec("liger_kernel") is None or not type(model).__module__.startswith("transformers.models."):
        return set()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    return set() if apply is None else inspect.signature(apply).parameters.keys()


def liger_mlps(model: PreTrainedModel) -> dict[str, bool]:
    """Return for each kind of Liger's MLPs whether it computes the activation of ``model``."""
    return {kind: activation(model) in computed for kind, computed in LIGER_MLPS.items()}


def activation(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def choose_kernels(asked: Kernels, model: PreTrainedModel, device: str, *, compiled: bool) -> ChosenKernels:
    """Return the kernels to use, ``asked`` unless it is ``auto``.

    ``auto`` means those of torch if torch.compile is used. Otherwise it means Liger's kernels on a CUDA GPU,
    and tiled norms on a CPU, if they support the model.
    """
    if asked != "auto":
        return asked
    if device == "cuda" and not compiled and has_liger(model):
        return "liger"
    return "tiled" if device == "cpu" and not compiled and has_replaceable_norms(model) else "torch"


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the forward of norms and MLPs of ``model`` by Liger's; parameters and their names stay.

    Attention and the head are this project's own. The rotary embedding is not replaced, because it is a
    function of the transformers module: replacing it would change other models of the process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    off = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)
    on = dict.fromkeys(("rms_norm", "layer_norm"), True) | liger_mlps(model)
    if grouped_experts(model):
        on["swiglu"] = False  # it expects transformers' experts, which are replaced by ours
    # Some families are known to Liger as causal models and as models without a head, not as classifiers.
    known = model.base_model if has_scalar_head(model) else model
    _apply_liger_kernel_to_instance(model=known, **on, **off)
    # The call above also replaces the classes, which would change models built later.
    vars(module).update(before)
