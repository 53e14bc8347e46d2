"""The loss at a vocabulary of 128k needs far less memory than full logits, each in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

VOCABULARY, TOKENS, HIDDEN = 128256, 2048, 32

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from components.engines.shared.token_log_probs import token_stats

torch.set_num_threads(1)
how, vocabulary, tokens, width = sys.argv[1], *map(int, sys.argv[2:])
g = torch.Generator().manual_seed(0)
hidden = torch.randn(tokens, width, generator=g).requires_grad_()
weight = torch.randn(vocabulary, width, generator=g).requires_grad_()
labels = torch.randint(0, vocabulary, (tokens,), generator=g)

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
before = memory("VmRSS")
if how == "full":
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
else:
    weights = torch.ones(tokens) if how == "weighted" else None
    loss = -token_stats(hidden, weight, labels, weights=weights).logps.sum()
loss.backward()
print(memory("VmHWM") - before, loss.item(), weight.grad.norm().item(), hidden.grad.norm().item())
"""


def measure(how: str) -> list[float]:
    """Return the peak KiB above the inputs, the loss, and the gradient norms of weight and hidden."""
    command = [sys.executable, "-c", PROGRAM, how, *map(str, (VOCABULARY, TOKENS, HIDDEN))]
    root = Path(__file__).parents[4]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    return [float(word) for word in answer.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_under_a_quarter_of_full_logits() -> None:
    peak, *expected = measure("full")
    assert peak >= 2 * 4 * VOCABULARY * TOKENS / 1024, "full logits and their gradient: the yardstick is real"
    for how in ("weighted", "recomputed"):
        chunked, *values = measure(how)
        assert values == pytest.approx(expected, rel=1e-4)
        assert chunked < peak / 4, f"{how}: {chunked / 2**20:.2f} GiB, full logits {peak / 2**20:.2f} GiB"
