"""A rank's part of the model: its chunks, and which Hugging Face tensors their parameters hold."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.engine import EngineOptions
from components.engines.megatron.checks import uses_transformer_engine
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.hf_weights import HFTensorSlices, hf_slices
from components.engines.megatron.runtime.lora import adapt
from components.engines.megatron.runtime.model import build_chunks
from components.engines.megatron.runtime.moe_router import Router, find_routers
from components.models import ModelSpec, WeightSource, named_shapes
from components.models.experts import moe_blocks, router_biases


@dataclass(frozen=True)
class BuiltChunks:
    chunks: list[nn.Module]
    trained: HFTensorSlices
    frozen: HFTensorSlices
    biases: HFTensorSlices
    """Of routers: no gradient reaches them, but training changes them and a checkpoint has them."""
    routers: list[Router]


def build_model_chunks(
    meta: PreTrainedModel, config: TransformerConfig, layout: Layout, options: EngineOptions
) -> BuiltChunks:
    """Build this rank's chunks without values. ``meta`` is the Hugging Face model on the meta device.

    What ``meta`` has frozen is frozen here, and with an adapter everything except its parameters.
    """
    dtype, adapter = options.dtype, options.adapter
    engine = uses_transformer_engine(meta.config, layout, dtype, options.device, adapter)
    bare = build_chunks(meta.config, config, transformer_engine=engine)
    moving = set() if adapter else set(router_biases(meta))
    frozen_names = {n for n, p in meta.named_parameters() if adapter or not p.requires_grad}
    found, recomputed = hf_slices(bare, named_shapes(meta)), layout.activation_checkpointing == "full"
    trained, frozen = freeze_parameters(bare, found, frozen_names, recomputed=recomputed)
    if adapter is not None:
        targets = frozenset(adapter.targets(meta))
        for chunk in bare:
            trained |= adapt(chunk, frozen, adapter, targets)
    routers = find_routers(bare)
    number_layers(routers, found, meta)
    chunks = [Float16Module(config, chunk) if dtype != torch.float32 else chunk for chunk in bare]
    kept: HFTensorSlices = {p: members for p, members in frozen.items() if members[0].name in moving}
    for router in routers:  # sums of small changes, which half precision would lose
        if router.experts.biased:
            router.expert_bias.data = router.expert_bias.data.float()
    return BuiltChunks(chunks, trained, {p: m for p, m in frozen.items() if p not in kept}, kept, routers)


def number_layers(routers: Sequence[Router], found: HFTensorSlices, meta: PreTrainedModel) -> None:
    """Tells routers which they are of those of ``meta``: a pipeline stage has but some."""
    order = list(moe_blocks(meta))
    for router in routers:
        router.layer = order.index(found[router.weight][0].name.removesuffix(".gate.weight"))


def initial_weights(spec: ModelSpec, meta: PreTrainedModel, options: EngineOptions) -> WeightSource:
    """Give the initial values of the model's parameters and of the adapter's."""
    base, adapter = spec.weights(options.seed), options.adapter
    if adapter is None:
        return base
    added, names = adapter.weights(meta, options.seed, base), adapter.shapes(meta)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return (added if name in names else base)(name, index)

    return read


def wrap_ddp(
    config: TransformerConfig, chunk: nn.Module, layout: Layout, number: int
) -> DistributedDataParallel:
    """Data parallelism with gradients that add up, and are reduced, in fp32."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
    )
    # Chunks past the first end their backward early: nothing is gained by reducing them in parts.
    return DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)


@contextmanager
def without_dropout(chunks: Sequence[nn.Module]) -> Iterator[None]:
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, before, strict=True):
            chunk.train(training)


def freeze_parameters(
    chunks: Sequence[GPTModel], found: HFTensorSlices, names: Collection[str], *, recomputed: bool
) -> tuple[HFTensorSlices, HFTensorSlices]:
    """Freezes the parameters of ``found`` that hold the Hugging Face ones ``names``; (trained, frozen) ones.

    ``recomputed``: layers are computed again in the backward, which Megatron does only where their input
    asks for a gradient. Embedded tokens then ask for one, though a frozen embedding has no use for it.
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


def ask_for_gradient(_module: object, _inputs: object, embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
