"""Passes of micro-batches through Megatron's pipeline schedules, without the rest of a train step.

The stages of a micro-batch::

    Batch [B, T]                 the same on every pp, tp and cp rank of a data-parallel rank
      -> CPShard [B, T / cp]     this rank's early and late chunks of each sequence or
                                 padded row (cp_sharding.shard_batch), equally long in all
                                 micro-batches if vpp > 1
      -> ForwardRequest          with the statistics the loss needs and the inputs of routers
                                 and MTP layers
      -> PipelineInput           with its index; if vpp > 1, fillers make the number of inputs a
                                 multiple of pp
      -> hidden states           between stages: [T / cp, B, H], or [T / cp / tp, B, H] with
                                 sequence_parallel
      -> TokenStats [B, T / cp]  of the labels, on the last stage (model.LogProbGPTModel)
      -> TokenStats [B, T]       gathered over cp (gather_stats)
      -> scalar                  loss and sums by the engine's ``consume``; Megatron
                                 differentiates the scalar
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from components.contracts.batch import IGNORE, Batch
from components.contracts.device_copy import to_device
from components.contracts.json_types import Json
from components.contracts.loss import Loss
from components.engines.megatron.float8 import RECIPES
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.cp_sharding import (
    CPShard,
    aligned_length,
    gather_shards,
    shard_batch,
)
from components.engines.megatron.runtime.dropout_hashes import MicrobatchHashes
from components.engines.megatron.runtime.model import ForwardRequest
from components.engines.megatron.runtime.moe_router import token_routing
from components.engines.shared.moe_losses import MoELosses
from components.engines.shared.mtp import TokenStatsWithMTP
from components.engines.shared.neftune import NO_NOISE, NEFTune
from components.engines.shared.oom import naming_microbatch
from components.models.mtp import MTPConfig

StageShape = tuple[int, int, int]
"""``(T / cp, B, H)`` of the hidden states between two stages, with T / cp / tp for sequence_parallel."""
Consume = Callable[[int, TokenStatsWithMTP], Tensor]
"""Function that is called on the last stage with the number of a micro-batch and its statistics (``[B, T]``,
whole rows on every context-parallel rank) and returns the scalar to differentiate."""


@dataclass(frozen=True)
class PipelineInput:
    """The input of one chunk for one micro-batch."""

    number: int
    request: ForwardRequest
    filler: bool
    """Whether this input is only there to make the number of inputs one that the schedule accepts."""


@dataclass(frozen=True)
class Pass:
    """The options of one pass of a schedule."""

    loss: Loss | None = None
    """The loss. Its ``requires`` names the statistics to compute besides ``logps``. If its ``weights`` are
    not None, the gradient of the output head is computed in the forward pass. None means that only ``logps``
    are computed."""
    mtp: MTPConfig | None = None
    """Multi-token prediction. None means that only the next token is predicted."""
    routers: MoELosses | None = None
    """The router terms of the loss and load counts. None means that nothing is added or counted."""
    forward_only: bool = False
    reduce: bool = False
    """Whether every stage reduces its gradients during the backward pass of the last micro-batch."""
    neftune: NEFTune = NO_NOISE
    dropout_seed: int | None = None
    """Seed of the masks of adapter dropout. None means that the adapter has no dropout."""
    factor: float = 1.0
    """Factor by which the loss is multiplied in the backward pass."""


def run_schedule(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Batch],
    consume: Consume,
    layout: Layout,
    device: torch.device,
    wanted: Pass,
) -> None:
    """Run one pass of a schedule: 1F1B, interleaved, or without pipelining if there is one stage.

    ``microbatches`` are those of this data-parallel rank, all with the same number of rows.

    Gradients accumulate in this rank's buffers over all passes of the train step. Megatron's
    ``finalize_model_grads_func`` is not set, because the engine finalises them itself.
    """
    if not microbatches:
        return
    begin_first_gather(chunks[0])
    routed = any(get_attr_wrapped_model(chunk, "routers") for chunk in chunks)
    multiple = RECIPES[layout.fp8_recipe].multiple if get_model_config(chunks[0]).fp8 else 1
    items = make_inputs(microbatches, layout, device, wanted, routed=routed, multiple=multiple)
    group = parallel_state.get_context_parallel_group()

    def forward_step(
        source: Iterator[PipelineInput], chunk: nn.Module
    ) -> tuple[object, Callable[[object], object]]:
        item = next(source)
        if not item.filler:
            begin(item.number)
        return chunk(item.request), partial(finish, item)

    def finish(item: PipelineInput, stats: TokenStatsWithMTP) -> tuple[Tensor, Tensor, dict[str, object]]:
        whole = gather_stats(stats, item.request.shard, group)
        if item.filler:  # a scalar that depends on every parameter, with a gradient of 0
            scalar = whole.logps.sum() if whole.values is None else 0 * whole.values.sum()
            scalar = scalar + sum(logps.sum() for logps in whole.mtp)
        else:
            scalar = consume(item.number, whole)
        return scalar, torch.zeros((), dtype=torch.int), {}  # the engine counts labels itself

    schedule, accumulate = get_forward_backward_func(), partial(local_gradients, chunks)
    # The schedule calls this function for all micro-batches except the last. Without ``grad_sync_func``,
    # stages after the first do not delay their reductions until the pipeline is empty.
    get_model_config(chunks[0]).no_sync_func = accumulate if wanted.reduce else None
    with nullcontext() if wanted.reduce else accumulate(), naming_microbatch(microbatches) as begin:
        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(items),
            seq_length=items[0].request.shard.input_ids.shape[1] * layout.cp,
            micro_batch_size=items[0].request.shard.input_ids.shape[0],
            forward_only=wanted.forward_only,
            adjust_tensor_shapes_fn=shapes_in_turn(items, layout) if layout.pp > 1 == layout.vpp else None,
        )


class ShapesInTurn(list[StageShape]):
    """The shapes that a stage receives, of which each iteration yields only that of the next micro-batch.

    Megatron's 1F1B schedule iterates over the shapes once for each micro-batch that it receives. It takes a
    list of integers for a single shape, but not a list of length 0, which this one always has.
    """

    def __init__(self, shapes: Sequence[StageShape]) -> None:
        super().__init__()
        self._rest = iter(shapes)

    def __iter__(self) -> Iterator[StageShape]:
        return iter([next(self._rest)])


def shapes_in_turn(
    items: Sequence[PipelineInput], layout: Layout
) -> Callable[[list[StageShape], list[StageShape]], tuple[ShapesInTurn, ShapesInTurn]]:
    """Return how Megatron's schedule adjusts the shapes of its hidden states and of their gradients.

    Rows of a micro-batch then have no padding up to the longest micro-batch of the pass.
    """
    split = layout.tp if layout.sequence_parallel else 1

    def adjust(received: list[StageShape], _sent: list[StageShape]) -> tuple[ShapesInTurn, ShapesInTurn]:
        hidden = received[0][-1]
        sizes = (item.request.shard.input_ids.shape for item in items)
        shapes = [(length // split, rows, hidden) for rows, length in sizes]
        return ShapesInTurn(shapes), ShapesInTurn(shapes)

    return adjust


def begin_first_gather(chunk: nn.Module) -> None:
    """Begin to gather the updated weights that this rank needs first, before its inputs have arrived."""
    if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook:
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            if groups and not groups[-1].param_gather_dispatched:
                groups[-1].start_param_sync()


def make_inputs(
    microbatches: Sequence[Batch],
    layout: Layout,
    device: torch.device,
    wanted: Pass,
    *,
    routed: bool = False,
    multiple: int = 1,
) -> list[PipelineInput]:
    """Build the pipeline inputs on ``device``, with rows of equal length if vpp > 1.

    Megatron's interleaved schedule exchanges hidden states of one shape only.
    ``multiple`` divides the length of the part of a row that a rank has between two layers.

    Collective over data-parallel ranks with moe_token_dispatcher=allgather or moe_pad_to_capacity, because
    ranks that exchange tokens must then have the same number of tokens.
    """
    multiple *= layout.tp * layout.cp if layout.sequence_parallel else layout.cp
    lengths = [aligned_length(batch, cp=layout.cp, multiple=multiple) for batch in microbatches]
    if layout.moe_token_dispatcher == "allgather" or layout.moe_pad_to_capacity:
        agreed = torch.tensor(lengths)  # in host memory, so that the host does not wait for a GPU
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        lengths = agreed.tolist()
    common = max(lengths) if layout.vpp > 1 else None
    rank = parallel_state.get_context_parallel_rank()
    loss, mtp = wanted.loss, wanted.mtp

    def item(number: int, batch: Batch, *, filler: bool) -> PipelineInput:
        length = common or lengths[number]
        row = shard_batch(batch, cp=layout.cp, rank=rank, multiple=multiple, length=length)
        routing = (
            token_routing(batch, row, wanted.routers, device, split=layout.sequence_parallel)
            if routed
            else None
        )
        weights = None if loss is None else loss.weights(batch)
        scattered = None if weights is None else to_device(row.scatter(weights * wanted.factor), device)
        noise = None
        if wanted.neftune.alpha:
            keys, spread = (own_positions(row.scatter(v), layout) for v in wanted.neftune.noise_of(batch))
            noise = to_device(keys, device), to_device(spread, device)
        hashes = None
        if wanted.dropout_seed is not None:
            hashes = MicrobatchHashes.of(batch, row, layout, wanted.dropout_seed, device)
        requires: frozenset[str] = frozenset() if loss is None else loss.requires
        ahead = mtp.batches(batch) if mtp else ()
        depths = tuple(mtp_request(shifted, row, device, wanted.factor) for shifted in ahead)
        request = ForwardRequest(row.to(device), requires, scattered, noise, hashes, routing, depths)
        return PipelineInput(number, request, filler)

    assert len({len(batch.labels) for batch in microbatches}) == 1, (
        "micro-batches of one call have as many rows"
    )
    items = [item(number, batch, filler=False) for number, batch in enumerate(microbatches)]
    # The interleaved schedule needs a multiple of pp micro-batches.
    fillers = -len(items) % layout.pp if layout.vpp > 1 else 0
    blank = as_padding(microbatches[-1])
    return items + [item(-1, blank, filler=True) for _ in range(fillers)]


def as_padding(batch: Batch) -> Batch:
    """Return a batch of the same size that is only padding, which losses and routers do not count."""
    labels, seqlens = torch.full_like(batch.labels, IGNORE), torch.zeros_like(batch.seqlens)
    return replace(batch, labels=labels, seqlens=seqlens, label_index=None)


def own_positions(values: Tensor, layout: Layout) -> Tensor:
    """Return the part of ``values [B, L]`` that matches the embedding's output on this tp rank.

    With sequence_parallel this is ``[L / tp, B]``, otherwise ``values`` itself.
    """
    if not layout.sequence_parallel:
        return values
    return values.t().chunk(layout.tp)[parallel_state.get_tensor_model_parallel_rank()]


def mtp_request(batch: Batch, row: CPShard, device: torch.device, factor: float) -> ForwardRequest:
    """Return the input of an MTP depth; ``batch`` is the micro-batch in ``row``, shifted for that depth."""
    labels = row.scatter(batch.labels, IGNORE)
    shifted = replace(row, input_ids=row.scatter(batch.input_ids), labels=labels).to(device)
    return ForwardRequest(shifted, weights=(shifted.labels != IGNORE) * factor)


def gather_stats(stats: TokenStatsWithMTP, row: CPShard, group: dist.ProcessGroup) -> TokenStatsWithMTP:
    """Gather statistics into whole rows, because a loss may sum over a sequence that is split over cp.

    Collective over ``group``.
    """
    found = {name: values for name, values in vars(stats).items() if isinstance(values, Tensor)}
    whole: Json = {name: gather_shards(values, row, group) for name, values in found.items()}
    return replace(stats, **whole, mtp=tuple(gather_shards(logps, row, group) for logps in stats.mtp))


def local_gradients(chunks: Sequence[nn.Module]) -> ExitStack:
    """Return a context in which Megatron's data parallelism reduces no gradients."""
    stack = ExitStack()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            stack.enter_context(chunk.no_sync())
    return stack
