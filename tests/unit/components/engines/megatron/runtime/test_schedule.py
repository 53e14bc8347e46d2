"""The host does not wait for the device in a pass of a schedule.

On the meta device, reading a number back raises an error, and copies are seen.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from components.engines.megatron.runtime import schedule
from components.engines.megatron.runtime.attention import packed_seq_params
from components.engines.megatron.runtime.attention_spans import full_spans, ring_spans
from components.engines.megatron.runtime.cp_sharding import shard_batch
from components.engines.megatron.runtime.model import ForwardRequest, LogProbGPTModel
from components.engines.megatron.runtime.moe_router import token_routing
from components.engines.shared import process_group, token_log_probs
from components.models.mtp import MTPConfig
from tests.distributed.cases import LAYOUTS, megatron, next_token, sequences

META = torch.device("meta")
VOCABULARY, WIDTH = 32, 8


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schedule.parallel_state, "get_context_parallel_rank", lambda: 0)
    monkeypatch.setitem(token_log_probs.CHUNK_BYTES, "meta", 1 << 12)
    process_group.init_process_group("cpu")
    yield
    process_group.destroy_process_group()


def requests(layout: str, cp: int = 1) -> Iterator[ForwardRequest]:
    """Yield the inputs of a step with two MTP layers, on the meta device."""
    wanted = schedule.Pass(next_token(), MTPConfig(2))
    batches = [LAYOUTS[layout](sequences())] * 2
    for item in schedule.make_inputs(batches, megatron(cp=cp), META, wanted):
        yield item.request
        yield from item.request.mtp


def last_stage() -> Any:
    """Return what ``LogProbGPTModel.statistics`` reads of a chunk."""
    head = torch.empty(VOCABULARY, WIDTH, device=META, requires_grad=True)
    return SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=False),
        tp=dist.group.WORLD,
        head=head,
        head_rows=VOCABULARY,
        shard=None,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2])
def test_the_last_stage_reads_nothing_back(layout: str, cp: int) -> None:
    for request in requests(layout, cp):
        rows, length = request.shard.labels.shape
        hidden = torch.empty(length, rows, WIDTH, device=META, requires_grad=True)
        stats = LogProbGPTModel.statistics(last_stage(), hidden, request)
        stats.logps.sum().backward()
        assert hidden.grad is not None


class Copies(TorchDispatchMode):
    """Records whether the host would wait for each copy to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default and options.get("device") == META:
            self.waited.append(not options.get("non_blocking", False))
        return func(*args, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2])
def test_no_copy_of_a_pass_is_waited_for(layout: str, cp: int) -> None:
    with Copies() as copies:
        for request in requests(layout, cp):
            packed_seq_params(replace(request.shard, cu_seqlens=torch.tensor([0, 8])), META)
        batch = LAYOUTS[layout](sequences())
        token_routing(batch, shard_batch(batch, cp=cp, rank=0, multiple=1), None, META, split=False)
        full_spans((0, 8, 16), cp, META)
        ring_spans((0, 8, 16), cp, 0, META)
    assert len(copies.waited) > 30
    assert not any(copies.waited)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_not_divided_stays_in_pinned_memory(layout: str) -> None:
    """Its tensors are copied from where they are, not from a copy in pageable memory."""
    batch = LAYOUTS[layout](sequences())
    row = shard_batch(batch, cp=1, rank=0, multiple=1)
    for name in ("input_ids", "labels", "position_ids"):
        assert getattr(row, name) is getattr(batch, name)
    assert row.scatter(batch.labels) is batch.labels
