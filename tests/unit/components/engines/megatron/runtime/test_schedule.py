"""The host does not wait for the device in a pass of a schedule.

On the meta device, reading a number back raises an error.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.engines.megatron.runtime import schedule
from components.engines.megatron.runtime.model import ForwardRequest, LogProbGPTModel
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
