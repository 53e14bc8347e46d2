import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from components.engines.shared.process_group import keep_freed_memory
assert sys.argv[1] == "as it was" or keep_freed_memory()
for mebibytes in (24, 64):
    for turn in range(40):
        torch.ones(mebibytes << 18)
        if turn == 19:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> list[int]:
    """Return the numbers of page faults of twenty tensors of 24 MiB, and of 64 MiB."""
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"})
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="a switch of glibc")
def test_blocks_up_to_a_size_are_not_mapped_again() -> None:
    """After a few tensors, later ones reuse freed memory without new page faults; huge ones are freed."""
    (small, huge), (_, unchanged) = page_faults("kept"), page_faults("as it was")
    assert small < unchanged / 20
    assert huge == pytest.approx(unchanged, rel=0.05)
