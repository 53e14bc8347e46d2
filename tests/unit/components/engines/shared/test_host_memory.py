import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from components.engines.shared.process_group import keep_freed_memory
assert sys.argv[1] == "as it was" or keep_freed_memory()
for turn in range(40):
    torch.ones(16 << 20)
    if turn == 19:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"})
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a switch of glibc")
def test_large_blocks_are_not_mapped_again() -> None:
    """After the first few tensors of 64 MiB, later ones reuse freed memory without new page faults."""
    assert page_faults("kept") < page_faults("as it was") / 20
