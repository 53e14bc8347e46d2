"""The estimated memory of a rank against the peak of torch's allocator, in some cells of the benchmark."""

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from benchmarks.memory.memory_cells import Bench
from benchmarks.memory.memory_ranks import measure, on_cpu
from components.preflight.estimates.quantities import MicrobatchShape
from tests.ranks import Ranks

CELLS = [
    ("single", "lora"),
    ("single", "dora"),
    ("fsdp2", "qlora bf16"),
    ("single recomputed", "tiny"),
    ("megatron", "bf16"),
    ("fsdp2", "dpo"),
    ("fsdp2 every", "small"),
    ("fsdp2 offload", "tiny"),
    ("fsdp2 tp2", "tiny"),
    ("fsdp2 cp2", "tiny"),
    ("dp2 sharded", "bf16"),
    ("pp2", "dpo"),
    ("pp2vpp2", "tiny"),
    ("hsdp", "tiny"),
    ("dp2 sharded", "muon bf16"),
    ("tp2", "muon"),
    ("fsdp2 tp2", "muon"),
    ("fsdp2 ep2", "experts"),
    ("ep2", "experts"),
    ("fsdp2 tp2", "ema"),
    ("megatron", "ema"),
    ("dp2 sharded", "ema"),
]

IN_RAM = """
from unittest import mock
from benchmarks.memory.memory_cells import WORKS, Bench
from benchmarks.memory.memory_ranks import measure, on_cpu, resident

bench = Bench("cpu")
with mock.patch("components.engines.shared.process_group.keep_freed_memory"):
    # What the first run imports late, and leaves behind, is there before the second one.
    config, _ = bench.compose("single", "tiny")
    for instrument in (resident, resident, on_cpu):
        print(measure(config, WORKS["tiny"].workload, "cpu", instrument).peak)
"""


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cpu")


@pytest.mark.parametrize(("layout", "work"), CELLS)
def test_the_estimate_is_what_was_held(bench: Bench, layout: str, work: str) -> None:
    cells = bench.cells(layout, work)
    if any(cell.held > cell.estimate for cell in cells if not cell.passes):
        warnings.warn("measured again: a block that gloo's threads freed may count, see on_cpu", stacklevel=1)
        cells = bench.cells(layout, work)
    for cell in cells:
        assert cell.passes, f"stage {cell.stage}: {cell.ratio:.3f} of what was held, {dict(cell.parts)}"


@pytest.mark.parametrize("layout", ["single recomputed", "megatron recomputed"])
def test_memory_is_proportional_to_the_length_of_a_sequence(bench: Bench, layout: str) -> None:
    """Equally many further tokens need equally many further bytes, and 65,536 tokens fit into 3 GiB."""
    config, _ = bench.compose(layout, "long")
    ranks, lengths = Ranks(1, megatron=True), (1024, 1536, 2048)
    held = [ranks.run(measure, config, MicrobatchShape(1, n, n, 1), "cpu")[0].peak for n in lengths]
    added = held[1] - held[0]
    assert held[2] - held[1] == pytest.approx(added, rel=0.01)
    assert held[0] + added * (65536 - 1024) // 512 < 3 * 2**30


def test_the_instrument_counts_what_is_there_at_once() -> None:
    """Freed blocks, blocks resized to zero, and blocks from before the measurement are not counted."""
    megabyte = 1 << 20
    kept: list[Any] = [torch.empty(megabyte, dtype=torch.uint8)]

    def begin() -> None:
        kept.append(torch.empty(3 * megabyte, dtype=torch.uint8))
        kept.append(torch.empty(50 * megabyte, dtype=torch.uint8))
        kept.pop().untyped_storage().resize_(0)

    def measured() -> None:
        kept.append(torch.empty(5 * megabyte, dtype=torch.uint8))
        kept.pop()
        kept.append(torch.empty(4 * megabyte, dtype=torch.uint8))
        kept.pop(0)

    assert on_cpu(begin, measured) == 8 * megabyte


def test_the_instrument_sees_what_the_system_sees() -> None:
    """Both counts agree in a process whose C library returns every block to the system at once."""
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", IN_RAM]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    _, seen, counted = map(int, answer.stdout.split())
    assert counted == pytest.approx(seen, rel=0.05)
