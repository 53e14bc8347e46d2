"""Building of the sharded model from its specification."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.fsdp2 import float8
from components.engines.fsdp2.compile import apply_liger, choose_kernels
from components.engines.fsdp2.context_parallel import ContextParallel
from components.engines.fsdp2.fsdp_private import InPlaceReduceScatter, fsdp_modules
from components.engines.fsdp2.grouped_experts import (
    bias_buffers,
    group_experts,
    grouped_experts,
)
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.log_prob_model import LogProbModel
from components.engines.fsdp2.lora import (
    describe_adapter,
    inject,
    is_initial,
    quantize_layers,
    replace_dropout,
)
from components.engines.fsdp2.mesh import (
    CONTEXT,
    SHARD,
    TENSOR,
    data_mesh,
    local_shard,
    shard_slices,
    weight_mesh,
)
from components.engines.fsdp2.moe_router_hooks import RouterHooks
from components.engines.fsdp2.tensor_parallel import apply_tp, first_row
from components.engines.fsdp2.tiled_norm import apply_tiled_norms
from components.engines.shared.activation_offloading import ActivationOffloading
from components.engines.shared.recomputation import recomputed_modules
from components.engines.shared.varlen_attention import ATTENTION, ATTENTION_RECOMPUTED
from components.engines.shared.vocab_parallel import VocabularyShard
from components.models import ModelSpec, WeightSource, materialize_buffers, nf4
from components.models.hf_private import block_names
from components.models.mtp import num_mtp_layers


def build_model(
    spec: ModelSpec,
    weights: WeightSource,
    ranks: DeviceMesh,
    layout: FSDP2Layout,
    options: EngineOptions,
    device: torch.device,
    *,
    trainable: bool,
) -> LogProbModel:
    """Build the model with ``weights``, sharded over all ``ranks`` block by block.

    Trained parameters have fp32 shards (the master weights), are cast to ``options.dtype`` for computing, and
    have their gradients reduced in fp32. With an adapter, the parameters of the model itself are frozen.
    Frozen parameters are stored in ``options.dtype`` or as the adapter quantises them, except the initial
    factors of PiSSA, which are in fp32. The initial values of an adapter may depend on the seed. Peak memory
    is that of the shards and of this rank's part of one more tensor. A tensor that is quantised is read in
    full, so that its values do not depend on the number of ranks. PiSSA decomposes full matrices, one after
    the other.
    """
    dtype, adapter = options.dtype, options.adapter if trainable else None
    # A frozen model saves no activations.
    recompute = layout.activation_checkpointing if trainable else "none"
    modules = recomputed_modules(recompute, layout.recompute_modules)
    attention = ATTENTION_RECOMPUTED if "core_attn" in modules else ATTENTION
    scorer = LogProbModel(
        spec.build(spec.config(), attention=attention), ContextParallel(ranks.get_group(CONTEXT))
    )
    mesh = weight_mesh(ranks)
    experts = weight_mesh(ranks, layout.ep) if layout.ep > 1 else mesh
    described = None if adapter is None else describe_adapter(adapter, scorer.lm)
    quantized = set() if adapter is None else adapter.quantized_weights(scorer.lm)
    group_experts(scorer.lm, experts, adapter)
    if adapter is not None and described is not None:
        inject(scorer.lm, described, is_pissa=adapter.is_pissa)  # before any parameter is split
        quantize_layers(scorer.lm, quantized)
        if adapter.dropout:
            replace_dropout(scorer.lm, scorer.hashes, device)
            scorer.dropout_seed = options.seed
    set_block_code(scorer, layout, options, device, recompute, modules)
    freeze(scorer, dtype, everything=not trainable)
    scorer.float8 = float8.convert(scorer.lm, layout, device.type) if options.float8 else {}
    if layout.tp > 1:
        apply_tp(scorer.lm, mesh[TENSOR])
        group, size = mesh.get_group(TENSOR), scorer.lm.config.vocab_size
        scorer.vocabulary = VocabularyShard(group, first_row(size, group), size)
    if trainable and grouped_experts(scorer.lm):
        scorer.routing = RouterHooks(spec.moe, scorer.lm, ranks, device)
    if trainable and layout.activation_offloading:
        scorer.offloading = apply_offloading(scorer.lm, device)
    apply_fsdp(scorer, mesh, experts, layout, dtype)
    scorer.to_empty(device="cpu" if layout.cpu_offload else device)
    materialize_buffers(scorer.lm, device)
    trained = weights
    if adapter is not None:
        trained = adapter.weights(spec.meta_model, options.seed, weights, restores=options.restores)
    copy_weights(scorer, trained, nf4.quantized(weights, quantized, device))
    load_router_biases(scorer.lm, weights, device)
    return scorer.train(trainable)


def set_block_code(
    scorer: LogProbModel,
    layout: FSDP2Layout,
    options: EngineOptions,
    device: torch.device,
    recompute: str,
    modules: Collection[str],
) -> None:
    """Choose the kernels of the blocks, compile their forward passes, and recompute parts of them."""
    scorer.kernels = choose_kernels(options.kernels, scorer.lm, device.type, compiled=options.compiled)
    if scorer.kernels == "liger":
        apply_liger(scorer.lm)
    elif scorer.kernels == "tiled":
        apply_tiled_norms(scorer.lm)
    blocks = decoder_blocks(scorer.lm)
    for block in blocks if options.compiled else ():
        # Only the forward inside FSDP's hooks is compiled, and the blocks share the compiled code.
        block.forward = torch.compile(block.forward)
    for module in recomputed_parts(blocks, layout, recompute, modules):
        apply_ac(module)


def freeze(scorer: LogProbModel, dtype: torch.dtype, *, everything: bool) -> None:
    """Store frozen parameters in ``dtype``, except PiSSA's initial factors; ``everything`` freezes all."""
    if everything:
        scorer.requires_grad_(False)
    for name, parameter in scorer.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and not is_initial(name):
            parameter.data = parameter.data.to(dtype)


def copy_weights(scorer: LogProbModel, trained: WeightSource, frozen: WeightSource) -> None:
    """Copy this rank's part of each weight into ``scorer``; initial factors of PiSSA are in ``trained``."""
    for member in scorer.members():
        source = trained if member.parameter.requires_grad or is_initial(member.name) else frozen
        copy_slice(member.slices(member.parameter), member.name, source)


def apply_fsdp(
    scorer: LogProbModel, mesh: DeviceMesh, expert_mesh: DeviceMesh, layout: FSDP2Layout, dtype: torch.dtype
) -> None:
    """Apply ``fully_shard`` to experts that ep ranks split, then to each group of blocks, then to the root.

    Gradients are summed over ranks instead of averaged.
    """
    # Inputs are ids, labels and fp32 label weights, and casting the latter would round the loss.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: Json = {"mesh": data_mesh(mesh), "mp_policy": policy}
    grouped = grouped_experts(scorer.lm).values()
    whole = {parameter: dim for module in grouped for parameter, dim in module.hidden_dimensions().items()}
    options["shard_placement_fn"] = partial(shard_dim, shards=mesh[SHARD].size(), whole=whole)
    if not layout.gathers_frozen(mesh[SHARD].size()):
        frozen = ((name, p) for name, p in scorer.named_parameters() if not p.requires_grad)
        options["ignored_params"] = {parameter for name, parameter in frozen if not is_initial(name)}
    if layout.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    if layout.ep > 1:  # on a different mesh than other parameters
        there: Json = options | {"mesh": data_mesh(expert_mesh)}
        shards = expert_mesh[SHARD].size()
        there["shard_placement_fn"] = partial(shard_dim, shards=shards, whole=whole)
        for experts in grouped:
            fully_shard(experts, reshard_after_forward=layout.reshard_after_forward, **there)
    blocks = decoder_blocks(scorer.lm)
    main = len(blocks) - num_mtp_layers(scorer.lm.config)  # MTP layers do not run in every forward pass
    groups = layout.groups(blocks[:main])
    for group in (*groups, *layout.groups(blocks[main:])):
        fully_shard(list(group), reshard_after_forward=layout.reshard_after_forward, **options)
    fully_shard(scorer, **options)
    if layout.prefetch_groups is not None:
        set_prefetching(groups, layout.prefetch_groups)
    split: Sequence[object] = list(grouped)  # the meshes are one if no ep ranks split them
    in_place = InPlaceReduceScatter()
    for module in fsdp_modules(scorer):
        if data_mesh(expert_mesh if module in split else mesh).size() > 1:
            # The engine divides once, at the end of the step. With gloo, a factor of 1 is not a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        elif not layout.cpu_offload:  # which copies gradients by a stream that FSDP does not wait for
            module.set_custom_reduce_scatter(in_place)  # type: ignore[arg-type]
            scorer.in_place_reduction = in_place


def set_prefetching(groups: Sequence[Sequence[nn.Module]], ahead: int) -> None:
    """Let every group of blocks begin the gathers of the ``ahead`` groups that compute after it.

    The blocks of a group share one state of FSDP, so the first block stands for all. Experts that are split
    over ep ranks have states of their own: those of the group itself are gathered before the next group.
    """
    own = [[list(fsdp_modules(block)) for block in group] for group in groups]  # each block, then its experts
    first = [blocks[0][0] for blocks in own]
    experts = [[module for block in blocks for module in block[1:]] for blocks in own]
    for number, module in enumerate(first):
        later = range(number + 1, min(number + 1 + ahead, len(groups)))
        forward = [*experts[number], *(m for n in later for m in (first[n], *experts[n]))]
        earlier = range(number - 1, max(number - 1 - ahead, -1), -1)
        backward = [*experts[number][::-1], *(m for n in earlier for m in (first[n], *experts[n][::-1]))]
        module.set_modules_to_forward_prefetch(forward)
        module.set_modules_to_backward_prefetch(backward)


def shard_dim(parameter: nn.Parameter, shards: int, whole: Mapping[nn.Parameter, int]) -> Shard | None:
    """Return the dimension that FSDP shards. None means dimension 0, of rows or of stacked experts.

    For a parameter of stacked experts, ``whole`` has the dimension to shard if ``shards`` does not divide the
    number of experts. Columns are sharded if tensor-parallel ranks have unequal numbers of rows, because
    torch would then compute wrong row offsets of the shards.
    """
    if parameter in whole:
        return Shard(whole[parameter]) if len(parameter) % shards else None
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None
    rows, *others = parameter.shape
    if rows % parameter.device_mesh.size() == 0:
        return None
    (columns,) = others
    assert columns % shards == 0, "tensor_parallel.check has looked at the columns"
    return Shard(1)


def mlp_kind(block: nn.Module) -> Literal["mlp", "moe"] | None:
    """Return whether a block is dense or has experts. None means that it has no module named ``mlp``."""
    mlp = getattr(block, "mlp", None)
    if mlp is None:
        return None
    return "moe" if hasattr(mlp, "experts") else "mlp"


def recomputed_parts(
    blocks: Sequence[nn.Module], layout: FSDP2Layout, recompute: str, modules: Collection[str]
) -> list[nn.Module]:
    """Return what is recomputed as a whole: blocks if ``recompute`` is ``full``, otherwise MLPs.

    ``modules`` contains the kinds of these MLPs, ``mlp`` or ``moe``.
    """
    if recompute == "full":
        return [*blocks[: layout.recompute_num_layers]]
    return [block.get_submodule("mlp") for block in blocks if mlp_kind(block) in modules]


def mlp_kinds(lm: PreTrainedModel) -> set[str]:
    return {kind for block in decoder_blocks(lm) if (kind := mlp_kind(block)) is not None}


def apply_ac(module: nn.Module) -> None:
    """Save only the input of a block or MLP; the backward pass recomputes the rest, with the same dropout.

    Checkpointing is inside the hooks of FSDP, so these hooks run only once. Parameters keep their names.
    """
    forward = module.forward

    def checkpointed(*args: object, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed


def apply_offloading(lm: PreTrainedModel, device: torch.device) -> ActivationOffloading:
    """Offload the activations of ``lm``'s blocks; call it before ``fully_shard``, whose hooks run first."""
    offloading = ActivationOffloading(device)
    offloading.apply(lm.base_model, decoder_blocks(lm), grouped_experts(lm).values())
    return offloading


def block_prefixes(lm: PreTrainedModel) -> list[str]:
    """Return, for each of the ``decoder_blocks``, the beginning of the names of its parameters."""
    names = {id(module): f"{name}." for name, module in lm.named_modules()}
    return [names[id(block)] for block in decoder_blocks(lm)]


def decoder_blocks(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder blocks, by transformers' own list of classes (``_no_split_modules``).

    Raises:
        ConfigError: if the list is empty.
    """
    names = block_names(lm)
    found = [module for module in lm.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"model: {type(lm).__name__} names no decoder block to shard (_no_split_modules); "
            "choose a model that transformers itself can split."
        )
    return found


@torch.no_grad()
def copy_slice(parameter: Tensor, name: str, weights: WeightSource) -> None:
    """Copy only this rank's part of the weight ``name`` into ``parameter``, without communication."""
    index = shard_slices(parameter)
    if all(piece.stop > piece.start for piece in index):
        local_shard(parameter).copy_(weights(name, index))


@torch.no_grad()
def load_router_biases(lm: PreTrainedModel, weights: WeightSource, device: torch.device) -> None:
    """Load all router biases on every rank, in fp32 on the compute device."""
    for name, lost in bias_buffers(lm).items():
        owner, _, leaf = name.rpartition(".")
        value = weights(name).to(device, torch.float32, copy=True)
        assert value.shape == lost.shape, name
        setattr(lm.get_submodule(owner), leaf, value)
