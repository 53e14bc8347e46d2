"""Tensor parallelism of a transformers model: the splits of its matrices, and the all-reduces of ranks.

As in Shoeybi et al. (2019), the projections into attention heads and into the MLP's intermediate size are
split by output, and the projections back by input. So a rank computes whole heads and whole intermediate
channels, and one all-reduce follows attention, another the MLP. The vocabulary is split too. Norms are
replicated.

Parameters are DTensors for FSDP, checkpoints and sums over ranks. The forward pass uses the local tensors.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.fsdp2.lora import AdapterDropout
from components.engines.shared.parallel_dims import check_tp, divisors, suggest_sizes
from components.engines.shared.torch_private import (
    compute_local_shape_and_global_offset,
    own_parameters,
    traced_all_reduce,
)
from components.models.scalar_head import SCORE, has_scalar_head, ties_embedding

Layer = Any
"""A module with a weight, possibly wrapped by peft. Any, because torch does not declare attribute types."""

PRE_NORM = re.compile(r".*\.(input|post_attention)_layernorm|model\.norm|.*\.shared_head\.norm")
FOUR_NORMS = re.compile(r".*\.(input|pre_feedforward)_layernorm|model\.norm|.*\.shared_head\.norm")
ARCHITECTURES = {
    "llama": PRE_NORM,
    "mistral": PRE_NORM,
    "qwen2": PRE_NORM,
    "qwen3": PRE_NORM,
    "qwen3_moe": PRE_NORM,
    "mixtral": PRE_NORM,
    "gemma3_text": FOUR_NORMS,
    "deepseek_v3": PRE_NORM,
}
"""By model_type, the norms whose output enters matrices that are split by output, or the head. The inputs and
outputs of other norms, and their gradients, are the same on every rank."""

COLWISE = re.compile(r".*\.self_attn\.([qkv]|q_b|kv_b)_proj|.*\.mlp\.(shared_experts\.)?(gate|up)_proj")
ROWWISE = re.compile(r".*\.self_attn\.o_proj|.*\.mlp\.(shared_experts\.)?down_proj")
VOCABULARY = re.compile(r"model\.embed_tokens|lm_head")
JOINING = re.compile(r".*\.eh_proj")
"""Projections of MTP layers that are split by input. Every rank has the full input and uses its part."""
NORM = re.compile(
    r".*\.(input|post_attention|pre_feedforward|post_feedforward)_layernorm|model\.norm|.*\.shared_head\.norm"
)
HEAD_NORM = re.compile(r".*\.self_attn\.([qk]_norm|(q|kv)_a_layernorm)|.*\.[eh]norm")
"""Norms of which a rank uses only a part of the output (its heads, or its columns of ``JOINING``), or whose
output is a latent that enters such a part. They are replicated, and their gradients are summed over tp
ranks."""
ROUTER = re.compile(r".*\.mlp\.gate")
"""Routers. Every rank routes the same tokens to its parts of the experts."""
LATENT = re.compile(r".*\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)")
"""MLA down-projections. They are replicated, and their gradients are summed over tp ranks."""


def check(model: PreTrainedModel, tp: int, shards: int) -> None:
    """Check that ``tp`` ranks can split ``model``, and ``shards`` ranks can shard each part.

    Raises:
        ConfigError: if there is no plan for this kind of model, if ``tp`` does not fit its sizes, or if ranks
            have unequal numbers of rows of the vocabulary and ``shards`` does not divide the columns.
    """
    if tp == 1:
        return
    kind = model.config.model_type
    # The module is checked too, because custom code may use the model type llama.
    if kind not in ARCHITECTURES or not type(model).__module__.startswith("transformers.models."):
        raise ConfigError(
            f"parallelism.tp: {kind} ({type(model).__name__}) is not supported by "
            f"tensor parallelism, only {', '.join(ARCHITECTURES)}; use parallelism=fsdp2 or parallelism=hsdp."
        )
    check_tp(tp, model.config)
    rows, columns = model.config.vocab_size, model.config.hidden_size
    if rows % tp and columns % shards:
        raise ConfigError(
            f"parallelism.dp: tp = {tp} does not divide vocab_size = {rows} of this model, so that its "
            f"{columns} columns are sharded, which {shards} ranks (dp / dp_replicate x cp) do not divide; "
            f"let these be {suggest_sizes(shards, divisors(columns))}."
        )


def apply_tp(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split ``model`` (on the meta device) over the 1-D ``mesh``, before ``fully_shard``."""
    group, entering = mesh.get_group(), ARCHITECTURES[model.config.model_type]
    scalar = has_scalar_head(model)
    for name, module in list(model.named_modules()):
        if COLWISE.fullmatch(name):
            make_colwise(module, mesh)
        elif ROWWISE.fullmatch(name):
            make_rowwise(module, mesh)
        elif JOINING.fullmatch(name):
            to_dtensors(module, mesh, weight=Shard(1))
            module.forward = rowwise_local_input(module, group)
        elif NORM.fullmatch(name):
            to_dtensors(module, mesh, weight=Replicate())
            module.forward = with_local_weight(module, Replicate())
            # Every rank computes the whole scalar head, so that the gradient of its input is complete.
            if entering.fullmatch(name) and not (scalar and name == "model.norm"):
                module.register_forward_hook(lambda _, __, output: CopyToTP.apply(output, group))
            if name.endswith(".shared_head.norm"):
                # FSDP adds hooks to the output of a block, which views may lose.
                module.register_forward_hook(lambda _, __, output: output.clone())
        elif HEAD_NORM.fullmatch(name) or ROUTER.fullmatch(name):
            replicate(module, mesh)
        elif LATENT.fullmatch(name):
            for linear in linears(module):
                replicate(linear, mesh)
        elif VOCABULARY.fullmatch(name) and not isinstance(module.weight, DTensor):
            to_dtensors(module, mesh, weight=Shard(0), bias=Shard(0))
    replicate_scalar_head(model, mesh)
    embedding = model.get_input_embeddings()
    embedding.forward = vocab_parallel_embedding(embedding, group)
    if ties_embedding(model):
        model.get_output_embeddings().weight = embedding.weight
    cut = re.compile(r".*\.experts\.(gate_up|down)_proj")  # already split, over their own mesh
    left = [n for n, p in model.named_parameters() if not isinstance(p, DTensor) and not cut.fullmatch(n)]
    assert not left, f"{left[0]}: no rule says how it is cut"


def make_colwise(module: Any, mesh: DeviceMesh) -> None:
    """Split a linear layer by output, together with its LoRA matrices if peft has wrapped it.

    A is replicated, because every rank needs all of its r outputs. B is split by output.
    """
    linear = getattr(module, "base_layer", module)
    to_dtensors(linear, mesh, weight=Shard(0), bias=Shard(0))
    linear.forward = colwise(linear)
    for key, a in getattr(module, "lora_A", {}).items():
        b = module.lora_B[key]
        to_dtensors(a, mesh, weight=Replicate())
        to_dtensors(b, mesh, weight=Shard(0))
        a.forward, b.forward = with_local_weight(a, Partial()), colwise(b)


def make_rowwise(module: Any, mesh: DeviceMesh) -> None:
    """Split a linear layer by input, together with its LoRA matrices if peft has wrapped it.

    A is split by input too, and its r outputs are summed over ranks. B is replicated.
    """
    linear, group = getattr(module, "base_layer", module), mesh.get_group()
    to_dtensors(linear, mesh, weight=Shard(1), bias=Replicate())
    linear.forward = rowwise(linear, group)
    for key, a in getattr(module, "lora_A", {}).items():
        b = module.lora_B[key]
        to_dtensors(a, mesh, weight=Shard(1))
        to_dtensors(b, mesh, weight=Replicate())
        a.forward, b.forward = rowwise(a, group), with_local_weight(b, Replicate())
        if isinstance(dropout := module.lora_dropout[key], AdapterDropout):
            dropout.channels = dropout.channels.chunk(group.size())[group.rank()]


def replicate(module: Layer, mesh: DeviceMesh) -> None:
    """Replicate a module whose output enters different parts of the model on each rank.

    Its gradients are summed over ranks.
    """
    to_dtensors(module, mesh, weight=Replicate(), bias=Replicate())
    module.forward = with_local_weight(module, Partial())


def replicate_scalar_head(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replicate the scalar head of ``model``, if it has one; every rank computes its whole gradient."""
    head = model.get_submodule(SCORE) if has_scalar_head(model) else nn.Module()
    for module in head.modules():  # two linear layers if an adapter is trained
        if isinstance(module, nn.Linear):
            to_dtensors(module, mesh, weight=Replicate())


def linears(module: Layer) -> list[nn.Module]:
    """Return ``module`` in a list if it is a linear layer, or else the linear layers in peft's wrapper."""
    if not hasattr(module, "base_layer"):
        return [module]
    return [module.base_layer, *module.lora_A.values(), *module.lora_B.values()]


def to_dtensors(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Replace the parameters of ``module`` named in ``placements`` by DTensors on the meta device."""
    for name, placement in placements.items():
        whole = getattr(module, name, None)
        if whole is None:
            continue
        shape, _ = compute_local_shape_and_global_offset(whole.shape, mesh, [placement])
        local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        options: Json = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        cut = DTensor.from_local(local, mesh, [placement], **options)
        setattr(module, name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def local(parameter: Any, gradient: Placement | None = None) -> Any:
    """Return this rank's part of ``parameter`` as a plain tensor.

    ``gradient`` is the placement of its gradients on the ranks. None means that of the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


def colwise(linear: Layer) -> Callable[[Tensor], Tensor]:
    return lambda inputs: F.linear(inputs, local(linear.weight), local(linear.bias))


def rowwise(linear: Layer, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        total: Tensor = ReduceFromTP.apply(F.linear(inputs, local(linear.weight)), group)
        return total if linear.bias is None else total + local(linear.bias)

    return forward


def rowwise_local_input(linear: Layer, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return the forward of ``rowwise`` for an input that every rank has in full."""
    forward = rowwise(linear, group)
    return lambda inputs: forward(inputs.chunk(group.size(), -1)[group.rank()])


def with_local_weight(module: Layer, gradient: Placement | None = None) -> Callable[[Tensor], Tensor]:
    """Return the module's own forward, computed with the local parts of its parameters.

    ``gradient`` is as in ``local``.
    """
    forward = module.forward

    def on_local(inputs: Tensor) -> Tensor:
        used = own_parameters(module)
        own = dict(used)
        used.update({name: local(parameter, gradient) for name, parameter in own.items()})
        try:
            return forward(inputs)
        finally:
            used.update(own)

    return on_local


def vocab_parallel_embedding(embedding: Layer, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a forward of ``embedding`` that looks up tokens in this rank's rows, and all-reduces the result.

    The lookup is the module's own (Gemma scales the result). Tokens whose rows are on other ranks are 0
    before the sum.
    """
    start, rows = first_row(embedding.num_embeddings, group), len(local(embedding.weight))
    if embedding.padding_idx is not None:
        own = embedding.padding_idx - start
        embedding.padding_idx = own if 0 <= own < rows else None
    own_forward = with_local_weight(embedding)

    def forward(ids: Tensor) -> Tensor:
        position = ids - start
        here = (position >= 0) & (position < rows)
        total: Tensor = ReduceFromTP.apply(own_forward(position.where(here, 0)) * here[..., None], group)
        return total

    return forward


def first_row(size: int, group: dist.ProcessGroup) -> int:
    """Return the index of this rank's first row under ``Shard(0)`` of ``size`` rows.

    Each rank has ceil(size / ranks) rows, and the last ranks may have fewer.
    """
    return min(-(-size // group.size()) * group.rank(), size)


class CopyToTP(torch.autograd.Function):
    """Identity before modules that are split over ranks; the backward pass sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_from_tp(grads[0], ctx.group), None


class ReduceFromTP(torch.autograd.Function):
    """All-reduce of the partial results of the ranks; the backward pass is the identity."""

    @staticmethod
    def forward(ctx: object, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        return reduce_from_tp(part, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def reduce_from_tp(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return traced_all_reduce(part, group)
    total = part.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
