"""Functions that run on each rank of a memory measurement, and the ways to count bytes."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchStats
from components.contracts.engine import Engine, StepResult
from components.preflight.estimates.quantities import MicrobatchShape
from components.rank_info import RankInfo
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from runner.training.assembly import build_engine, unlogged_run

STEP = "the measured step"
SHORT = 64
"""Number of tokens of a row of the step before the measured one."""
NO_STATS = BatchStats(0, 0, 0, 0, 0.0, 0, 0)


@dataclass(frozen=True)
class Held:
    """Peak memory of one rank."""

    stage: int
    peak: int
    """Peak bytes of torch's allocator during a step, above those from before the engine was built."""


Instrument = Callable[[Callable[[], None], Callable[[], None]], int]
"""Function that calls two functions and returns the peak bytes during the second call."""


def measure(
    config: Mapping[str, Any], workload: MicrobatchShape, device: str, instrument: Instrument | None = None
) -> Held:
    """Measure the second of two steps of ``config``.

    The first one, on short rows, creates the moments. Hooks begin before it.
    """
    experiment = build_experiment(config, ConfigSources())
    hooks, engines = experiment.hook.values(), list[Engine]()

    def begin() -> None:
        engines.append(build_engine(experiment, device))
        for hook in hooks:
            hook.begin(unlogged_run(experiment, Path(), engines[0]))
        take_step(replace(workload, length=SHORT, labels=SHORT // 2 * workload.rows))

    def take_step(workload: MicrobatchShape) -> None:
        result = step(engines[0], experiment, workload)
        for hook in hooks:
            hook.after_step(unlogged_run(experiment, Path(), engines[0]), result, NO_STATS)

    instrument = instrument or (on_gpu if device == "cuda" else on_cpu)
    try:
        peak = instrument(begin, lambda: take_step(workload))
        return Held(stage_of(engines[0].describe()["mesh"]), peak)
    finally:
        while engines:
            engines.pop().close()


def on_cpu(begin: Callable[[], None], measured: Callable[[], None]) -> int:
    """Return the peak of the allocated bytes during ``measured``, according to torch's profiler.

    The profiler does not record that gloo's threads free a block. Such a block counts until its address is
    allocated again, or else until the end.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        begin()
        gc.collect()
        with record_function(STEP):
            measured()
    results = recorded.profiler.kineto_results
    (span,) = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in results.events() if e.name() == STEP]
    blocks: dict[int, int] = {}
    total = peak = 0
    for at, address, nbytes in sorted(allocations(results.experimental_event_tree())):
        total += max(nbytes, 0) - blocks.pop(address, 0)
        if nbytes > 0:
            blocks[address] = nbytes
        if span[0] <= at <= span[1]:
            peak = max(peak, total)
    return peak


def allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time in ns, address and size in bytes of each allocation; freed blocks have a negative size."""
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from allocations(event.children)


def on_gpu(begin: Callable[[], None], measured: Callable[[], None]) -> int:
    gc.collect()
    before = torch.cuda.memory_allocated()
    begin()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    measured()
    return torch.cuda.max_memory_allocated() - before


def resident(begin: Callable[[], None], measured: Callable[[], None]) -> int:
    """Return the peak resident memory in bytes during ``measured``, minus that before ``begin``."""
    gc.collect()
    before = memory("VmRSS")
    begin()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    measured()
    return memory("VmHWM") - before


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def step(engine: Engine, experiment: Experiment, workload: MicrobatchShape) -> StepResult:
    loss = experiment.stage
    microbatches = loss.prepare(make_batches(experiment, workload), engine)
    engine.begin_train_step(microbatches, loss)
    engine.train_microbatches(microbatches, loss, last=True)
    return engine.finish_train_step(1e-4)


def make_batches(experiment: Experiment, workload: MicrobatchShape) -> list[Batch]:
    """Return micro-batches of the size of ``workload``.

    Each row has one sequence, or with packed pairs two sequences of half the length.
    """
    kind, vocabulary = experiment.stage.kind, experiment.model.config().vocab_size
    packed = experiment.data.resolve_packing(kind) != "none"
    share = 2 if packed and kind == "preference" else 1
    number, length = workload.rows * share, workload.length // share
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (number, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, : length - workload.labels // number] = IGNORE
    positions = torch.arange(length).expand_as(ids).contiguous()
    seqlens = torch.full((number,), length, dtype=torch.int32)
    numbers = torch.arange(number)
    batch = Batch(ids, labels, positions, seqlens, pair_index=numbers, sequence_keys=numbers)
    return [pack(batch) if packed else batch] * workload.num_microbatches


def pack(batch: Batch) -> Batch:
    """Pack the rows of ``batch`` into one row."""
    seqlens = batch.seqlens
    return Batch(
        batch.input_ids.reshape(1, -1),
        batch.labels.reshape(1, -1),
        batch.position_ids.reshape(1, -1),
        seqlens,
        cu_seqlens=F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(seqlens.max()),
        pair_index=batch.pair_index,
        sequence_keys=batch.sequence_keys,
    )


def stage_of(mesh: Mapping[str, Any]) -> int:
    """Return the pipeline stage of this rank, or 0 without pipeline parallelism."""
    if "pp" not in mesh["dims"]:
        return 0
    place = (torch.tensor(mesh["ranks"]) == RankInfo.read().rank).nonzero()[0]
    return int(place[list(mesh["dims"]).index("pp")])
