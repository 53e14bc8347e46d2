"""The estimated memory of a rank against the peak of the CUDA allocator. Skipped without a GPU."""

import pytest
import torch

from benchmarks.memory.memory_cells import GPU_WORKS, LAYOUTS, Bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cuda")


@pytest.mark.parametrize("work", GPU_WORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_what_was_held(bench: Bench, layout: str, work: str) -> None:
    if not bench.can_run(layout):
        pytest.skip("takes more than one rank")
    for cell in bench.cells(layout, work):
        assert cell.passes, f"stage {cell.stage}: {cell.ratio:.3f} of what was held, {dict(cell.parts)}"
