import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from components.engines.shared.process_group import keep_freed_memory
assert sys.argv[1] == "as it was" or keep_freed_memory()
for turn in range(40):
    torch.ones(int(sys.argv[2]) << 18)
    if turn == 19:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str, mebibytes: int) -> int:
    command = [sys.executable, "-c", FAULTS, mode, str(mebibytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"})
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a switch of glibc")
def test_blocks_up_to_a_size_are_not_mapped_again() -> None:
    """After a few tensors, later ones reuse freed memory without new page faults; huge ones are freed."""
    assert page_faults("kept", 24) < page_faults("as it was", 64) / 20
    assert page_faults("kept", 64) == pytest.approx(page_faults("as it was", 64), rel=0.05)
