"""Runs micro-batches through Megatron's pipeline schedules, without anything that belongs to a whole step.

What a micro-batch becomes::

    Batch [B, T]             the same on every pp, tp and cp rank of a data rank
      -> Row [B, T / cp]     this rank's zig-zag share (rows.make_row), as long as the others if pp > 1
      -> Asked               with what the loss asks for, router traffic and the depths of further tokens
      -> Item                numbered; with vpp > 1 fillers make the number of items a multiple of pp
      -> hidden states       [T / cp, B, H], with sequence_parallel [T / cp / tp, B, H], from stage to stage
      -> Scores [B, T / cp]  of the labels, on the last stage (model.Scorer)
      -> Scores [B, T]       gathered over cp (gather_stats)
      -> scalar              the engine's ``consume``: loss and sums. Megatron differentiates it
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
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from components.contracts.batch import IGNORE, Batch
from components.contracts.loss import Loss
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.cp_sharding import (
    CPShard,
    aligned_length,
    gather_shards,
    shard_batch,
)
from components.engines.megatron.runtime.model import ForwardRequest
from components.engines.megatron.runtime.moe_router import token_routing
from components.engines.shared.moe_losses import MoELosses
from components.engines.shared.mtp import TokenStatsWithMTP
from components.engines.shared.oom import naming_microbatch
from components.models.mtp import MTPConfig

Consume = Callable[[int, TokenStatsWithMTP], Tensor]
"""Called on the last stage with the number of a micro-batch and its statistics (``[B, T]``, whole rows on
every context-parallel rank); returns the scalar to differentiate."""


@dataclass(frozen=True)
class PipelineInput:
    """What one chunk is given for one micro-batch."""

    number: int
    request: ForwardRequest
    filler: bool
    """Only there to make the number of micro-batches fit the schedule."""


@dataclass(frozen=True)
class Pass:
    """What one pass of a schedule computes."""

    loss: Loss | None = None
    """It says which statistics it needs besides ``logps``, and if it can has the gradient of the head made in
    the forward pass."""
    further: MTPConfig | None = None
    """Which tokens are predicted besides the next one."""
    routers: MoELosses | None = None
    """They add to the loss and count."""
    forward_only: bool = False
    reduce: bool = False
    """Buckets are reduced as the backward completes them: for a last pass of one micro-batch."""
    before: int = 0
    """Micro-batches of the step in passes before this one."""
    after: int = 0
    """Micro-batches of the step in passes after this one."""


def run_schedule(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Batch],
    consume: Consume,
    layout: Layout,
    device: torch.device,
    wanted: Pass,
) -> None:
    """One pass of a schedule: 1F1B, interleaved, or none where there is one stage.

    Every rank passes the micro-batches of its data rank, all of as many rows.

    Megatron's hooks for a whole step (reducing gradients with the last micro-batch, finalising them) are not
    set: gradients add up in this rank's buffers, over as many passes as the engine makes.
    """
    if not microbatches:
        return
    routed = any(get_attr_wrapped_model(chunk, "routers") for chunk in chunks)
    items = make_inputs(microbatches, layout, device, wanted, routed=routed)
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
        scalar = whole.logps.sum() if item.filler else consume(item.number, whole)
        return scalar, torch.zeros((), dtype=torch.int), {}  # counted by the engine, from labels

    schedule = get_forward_backward_func()
    with (
        nullcontext() if wanted.reduce else local_gradients(chunks),
        naming_microbatch(microbatches, before=wanted.before, after=wanted.after) as begin,
    ):
        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(items),
            seq_length=items[0].request.shard.input_ids.shape[1] * layout.cp,
            micro_batch_size=items[0].request.shard.input_ids.shape[0],
            forward_only=wanted.forward_only,
        )


def make_inputs(
    microbatches: Sequence[Batch],
    layout: Layout,
    device: torch.device,
    wanted: Pass,
    *,
    routed: bool = False,
) -> list[PipelineInput]:
    """Rows on ``device``: of one length where stages send them to each other.

    Collective with moe_token_dispatcher=allgather or moe_pad_to_capacity, since ranks that exchange tokens
    then need equally many.
    """
    multiple = layout.tp * layout.cp if layout.sequence_parallel else layout.cp
    lengths = [aligned_length(batch, cp=layout.cp, multiple=multiple) for batch in microbatches]
    if layout.moe_token_dispatcher == "allgather" or layout.moe_pad_to_capacity:
        agreed = torch.tensor(lengths, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        lengths = agreed.tolist()
    common = max(lengths) if layout.pp > 1 else None
    rank = parallel_state.get_context_parallel_rank()
    loss, mtp = wanted.loss, wanted.further

    def item(number: int, batch: Batch, *, filler: bool) -> PipelineInput:
        length = common or lengths[number]
        row = shard_batch(batch, cp=layout.cp, rank=rank, multiple=multiple, length=length)
        told = (
            token_routing(batch, row, wanted.routers, device, split=layout.sequence_parallel)
            if routed
            else None
        )
        weights = None if loss is None else loss.weights(batch)
        scattered = None if weights is None else row.scatter(weights).to(device)
        requires: frozenset[str] = frozenset() if loss is None else loss.requires
        depths = shifted_ids(mtp.batches(batch) if mtp and not filler else (), row, device)
        return PipelineInput(
            number, ForwardRequest(row.to(device), requires, scattered, told, depths), filler
        )

    assert len({len(batch.labels) for batch in microbatches}) == 1, (
        "micro-batches of one call have as many rows"
    )
    items = [item(number, batch, filler=False) for number, batch in enumerate(microbatches)]
    last = microbatches[-1]
    blank = replace(
        last,
        labels=torch.full_like(last.labels, IGNORE),
        seqlens=torch.zeros_like(last.seqlens),  # nothing of it is real, so no router counts it
        label_index=None,
    )
    return items + [item(-1, blank, filler=True) for _ in range(filler_inputs(len(items), layout))]


def shifted_ids(batches: Sequence[Batch], row: CPShard, device: torch.device) -> tuple[ForwardRequest, ...]:
    """What is asked of every depth of the micro-batch in ``row``."""

    def asked(batch: Batch) -> ForwardRequest:
        labels = row.scatter(batch.labels, IGNORE)
        shifted = replace(row, input_ids=row.scatter(batch.input_ids), labels=labels)
        return ForwardRequest(shifted.to(device), weights=(labels != IGNORE).float().to(device))

    return tuple(asked(batch) for batch in batches)


def filler_inputs(microbatches: int, layout: Layout) -> int:
    """The interleaved schedule takes a multiple of the number of stages."""
    return -microbatches % layout.pp if layout.vpp > 1 else 0


def gather_stats(stats: TokenStatsWithMTP, row: CPShard, group: dist.ProcessGroup) -> TokenStatsWithMTP:
    """Of whole rows: a loss may sum over a sequence that context parallelism has cut."""

    def whole(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_shards(values, row, group)

    return TokenStatsWithMTP(
        gather_shards(stats.logps, row, group),
        whole(stats.logsumexp),
        whole(stats.mean_logp),
        tuple(gather_shards(logps, row, group) for logps in stats.mtp),
    )


def local_gradients(chunks: Sequence[nn.Module]) -> ExitStack:
    """While it lasts, Megatron's data parallelism reduces nothing."""
    stack = ExitStack()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            stack.enter_context(chunk.no_sync())
    return stack
