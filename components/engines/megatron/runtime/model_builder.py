"""A rank's part of the model: its chunks, and the Hugging Face tensors that their parameters hold."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.engine import EngineOptions
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.hf_weights import HFTensorSlices, hf_slices
from components.engines.megatron.runtime.lora import adapt
from components.engines.megatron.runtime.model import build_chunks
from components.engines.megatron.runtime.moe_router import Router, find_routers
from components.engines.shared.activation_offloading import ActivationOffloading
from components.engines.shared.recomputation import recomputed_modules
from components.models import ModelSpec, WeightSource, named_shapes
from components.models.experts import moe_blocks, router_biases
from components.models.scalar_head import has_scalar_head


@dataclass(frozen=True)
class BuiltChunks:
    chunks: list[nn.Module]
    trained: HFTensorSlices
    frozen: HFTensorSlices
    stored: HFTensorSlices
    """Parameters in fp32 without a gradient that checkpoints contain: router biases, which training changes,
    or the initial factors of PiSSA."""
    routers: list[Router]
    offloading: ActivationOffloading | None


def build_model_chunks(
    meta: PreTrainedModel, config: TransformerConfig, layout: Layout, options: EngineOptions
) -> BuiltChunks:
    """Build this rank's uninitialised chunks; ``meta`` is the Hugging Face model on the meta device.

    Parameters frozen in ``meta`` are frozen here. With an adapter, all parameters are frozen except those
    that the adapter trains.
    """
    dtype, adapter = options.dtype, options.adapter
    config.groups_experts = layout.groups_experts(meta, adapter)
    bare = build_chunks(meta.config, config, scalar_head=has_scalar_head(meta))
    if (padding := meta.get_input_embeddings().padding_idx) is not None:
        for chunk in bare:
            if hasattr(chunk, "embedding"):
                chunk.embedding.word_embeddings.register_forward_hook(partial(stop_gradient, padding))
    moving = set() if adapter else set(router_biases(meta))
    # With an adapter, a scalar head is the only part of the model that is trained.
    added = {} if adapter is None else adapter.shapes(meta)
    frozen_names = {
        n for n, p in meta.named_parameters() if not (p.requires_grad if adapter is None else n in added)
    }
    found = hf_slices(bare, named_shapes(meta))
    modules = recomputed_modules(layout.activation_checkpointing, layout.recompute_modules)
    recomputed = layout.activation_checkpointing == "full" or not {"mlp", "moe"}.isdisjoint(modules)
    trained, frozen = freeze_parameters(bare, found, frozen_names, recomputed=recomputed)
    stored: HFTensorSlices = {p: members for p, members in frozen.items() if members[0].name in moving}
    if adapter is not None:
        targets = frozenset(adapter.targets(meta))
        for chunk in bare:
            for parameter, members in adapt(chunk, frozen, adapter, targets, chunk.hashes).items():
                (trained if parameter.requires_grad else stored)[parameter] = members
    routers = find_routers(bare)
    number_layers(routers, found, meta)
    chunks = [Float16Module(config, chunk) if dtype != torch.float32 else chunk for chunk in bare]
    # Half precision would lose small updates of biases, and round the factors that an export subtracts.
    for parameter in (*stored, *(router.expert_bias for router in routers if router.experts.biased)):
        parameter.data = parameter.data.float()
    offloading = None
    if layout.activation_offloading:
        offloading = ActivationOffloading(torch.device(options.device))
        for chunk in bare:
            offloading.apply(chunk.decoder, chunk.decoder.layers)
    frozen = {p: m for p, m in frozen.items() if p not in stored}
    return BuiltChunks(chunks, trained, frozen, stored, routers, offloading)


def number_layers(routers: Sequence[Router], found: HFTensorSlices, meta: PreTrainedModel) -> None:
    """Set each router's index among all MoE layers of ``meta``, of which a pipeline stage holds only some."""
    order = list(moe_blocks(meta))
    for router in routers:
        router.layer = order.index(found[router.weight][0].name.removesuffix(".gate.weight"))


def initial_weights(spec: ModelSpec, meta: PreTrainedModel, options: EngineOptions) -> WeightSource:
    """Return the source of the initial values of the model's parameters and of the adapter's."""
    base, adapter = options.watched(spec.weights(options.seed)), options.adapter
    if adapter is None:
        return base
    added = adapter.weights(meta, options.seed, base, restores=options.restores)
    names = adapter.shapes(meta) | adapter.initial_shapes(meta)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return (added if name in names else base)(name, index)

    return read


def wrap_ddp(
    config: TransformerConfig, chunk: nn.Module, layout: Layout, number: int, *, scattered: bool
) -> DistributedDataParallel:
    """Wrap a chunk for data parallelism, with gradients accumulated and reduced in fp32.

    ``scattered`` means that every rank needs only its range of the summed gradients, for the distributed
    optimizer.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=scattered,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.gathers_during_forward(whole_updates=not scattered),
        bucket_size=layout.bucket_size,
    )
    # Later chunks finish their backward pass early, so there is no gain from reducing them in buckets.
    return DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)


def link_gathers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the updated weights of a chunk while the chunk before it computes.

    Megatron begins the gather of a bucket when that of the bucket before it has ended, but that of a chunk's
    first bucket only when a layer needs it.
    """
    for earlier, later in pairwise(chunks):
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            before, after = getattr(earlier, name), getattr(later, name)
            if before and after:  # in the order of the backward pass
                before[0].next_param_gather_bucket_group = after[-1]


def freeze_parameters(
    chunks: Sequence[GPTModel], found: HFTensorSlices, names: Collection[str], *, recomputed: bool
) -> tuple[HFTensorSlices, HFTensorSlices]:
    """Freeze the parameters that hold Hugging Face tensors ``names``; split ``found`` into (trained, frozen).

    ``recomputed`` means that layers or their MLPs are recomputed in the backward pass, which Megatron does
    only if their input requires a gradient. The embedding's output then requires one, even if the embedding
    is frozen.
    """
    kept: HFTensorSlices = {}
    for parameter, members in found.items():
        answers = {member.name in names for member in members}
        assert len(answers) == 1, f"{[m.name for m in members]}: one tensor, of which a part is frozen"
        if True in answers:
            parameter.requires_grad_(False)
            kept[parameter] = members
    for chunk in chunks:
        if recomputed and chunk.pre_process and len(chunk.decoder.layers):
            chunk.embedding.register_forward_hook(ask_for_gradient)
    return {p: members for p, members in found.items() if p not in kept}, kept


def stop_gradient(
    padding: int, embedding: VocabParallelEmbedding, inputs: tuple[Tensor], embedded: Tensor
) -> Tensor:
    """Return ``embedded`` without the gradient of the padding token's embedding.

    transformers initialises this embedding to 0 and does not train it. ``embedded`` is ``[B, T, H]`` for
    input ids ``[B, T]``, or with sequence parallelism this rank's ``[T / tp, B, H]``.
    """
    is_padding = inputs[0] == padding
    if embedding.reduce_scatter_embeddings:
        of_rank = is_padding.t().chunk(parallel_state.get_tensor_model_parallel_world_size())
        is_padding = of_rank[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(is_padding.unsqueeze(-1), embedded.detach(), embedded)


def ask_for_gradient(_module: object, _inputs: object, embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
