"""One module per expert, with the parameter names used in Hugging Face files.

transformers stacks the experts of a layer in two tensors (``experts.gate_up_proj`` ``[E, 2I, H]`` and
``experts.down_proj`` ``[E, H, I]``), but its files, other programs and adapters store each expert separately.
The models that this program builds have separate experts, too, so initial weights, checkpoints, exports and
adapters need no special case for experts. An engine with grouped matrix products stacks the experts itself.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BIAS = "e_score_correction_bias"
"""Name of a router's bias, which is added to the expert scores before top-k. It receives no gradient."""

EXPERT_PARAM = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<leaf>.*)")
"""Name of a parameter of one expert or of its adapter."""

FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<leaf>gate_up_proj|down_proj)")


class MetaLinear(nn.Linear):
    """A linear layer on the meta device, built without initial values because there are thousands of them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
        self.register_parameter("bias", None)


class Expert(nn.Module):
    """One expert: ``down(silu(gate x) * (up x))``."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = MetaLinear(hidden, intermediate)
        self.up_proj = MetaLinear(hidden, intermediate)
        self.down_proj = MetaLinear(intermediate, hidden)


class ExpertList(nn.ModuleList):
    """The experts of one layer, in order. It has no forward pass; see ``GroupedExperts``."""


def unfuse_experts(model: PreTrainedModel) -> None:
    """Replace stacked experts by ``ExpertList`` and router bias buffers by parameters.

    ``model`` is on the meta device. The biases require no gradient.
    """
    for block in list(model.modules()):
        stacked: Any = getattr(block, "experts", None)
        if isinstance(getattr(stacked, "gate_up_proj", None), nn.Parameter):
            number, hidden, intermediate = stacked.down_proj.shape
            block.experts = ExpertList(Expert(hidden, intermediate) for _ in range(number))
        if BIAS in dict(block.named_buffers(recurse=False)):
            bias = block.get_buffer(BIAS)
            delattr(block, BIAS)
            block.register_parameter(BIAS, nn.Parameter(bias, requires_grad=False))


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that have a router (``gate``) and ``experts``, by name, in the order of layers."""
    return {
        name: m for name, m in model.named_modules() if isinstance(getattr(m, "experts", None), ExpertList)
    }


def router_biases(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the router biases by name.

    They have no gradient; ``bias_update_rate`` may change them.
    """
    return {name: p for name, p in model.named_parameters() if name.endswith(f".{BIAS}")}


def is_fully_trained(model: nn.Module) -> bool:
    """Return whether all parameters require a gradient, except for router biases, which never do."""
    fixed = router_biases(model).values()
    return all(p.requires_grad or any(p is bias for bias in fixed) for p in model.parameters())


def number_of_experts(model: nn.Module) -> int:
    """Return the number of experts in each MoE layer, or 0 for a dense model."""
    return next((len(module) for module in model.modules() if isinstance(module, ExpertList)), 0)


def share_of_experts(model: PreTrainedModel) -> float:
    """Return the fraction of the expert weights that each token uses, or 1 for a dense model."""
    number = number_of_experts(model)
    return float(model.config.get_text_config().num_experts_per_tok) / number if number else 1.0


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which transformers stores the tensor ``name`` if the model is stored in ``dtype``.

    Router biases stay in float32: they are sums of small updates, which half precision would lose.
    """
    return torch.float32 if name.endswith(f".{BIAS}") else dtype


def unstack_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a transformers model, with each stack of experts split into views.

    There is one view for each expert and matrix: ``gate_up_proj`` ``[E, 2I, H]`` becomes E ``gate_proj`` and
    E ``up_proj``, each ``[I, H]``.
    """
    for name, tensor in tensors:
        found = FUSED.fullmatch(name)
        if found is None or tensor.dim() != 3:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            prefix = f"{found['experts']}.{number}"
            if found["leaf"] == "down_proj":
                yield f"{prefix}.down_proj.weight", expert
            else:
                gate, up = torch.chunk(expert, 2)
                yield f"{prefix}.gate_proj.weight", gate
                yield f"{prefix}.up_proj.weight", up
