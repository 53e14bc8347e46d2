"""DPO of an adapter needs much less memory than DPO of the whole model, each measured in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
from omegaconf import OmegaConf
from components.adapters import LoRA
from components.engines.fsdp2 import FSDP2
from components.losses import DPO
from components.models import ModelSpec
from components.optimizers import AdamW
from components.contracts.batch import IGNORE, Batch
from components.contracts.engine import EngineOptions

import peft
torch.set_num_threads(1)
adapted = sys.argv[1] == "adapter"
node = OmegaConf.to_container(OmegaConf.load("conf/model/tiny.yaml"))
spec = ModelSpec(architecture=node["architecture"])

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

def batch(rows=4, length=64):
    ids = torch.randint(0, 8192, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, : length // 2] = IGNORE
    positions = torch.arange(length).expand(rows, length).contiguous()
    lengths = torch.full((rows,), length, dtype=torch.int32)
    return Batch(ids, labels, positions, lengths, pair_index=torch.arange(rows))

def step(engine, loss):
    batches = loss.prepare([batch()], engine)
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches, loss, last=True)
    engine.finish_train_step(1e-3)

def build(spec):
    return FSDP2(dp=1, default_dp=1, reshard_after_forward=True).build(
        spec,
        AdamW(),
        EngineOptions(
            torch.float32,
            "cpu",
            reference="adapter_off" if adapted else "frozen",
            adapter=LoRA(r=16, alpha=32.0, target_modules="all-linear") if adapted else None,
        ),
    )

small = dict(node["architecture"], hidden_size=32, intermediate_size=32, num_hidden_layers=1)
warm = build(ModelSpec(architecture=small))  # imports and thread pools are not the model's
step(warm, DPO(beta=0.1, label_smoothing=0.0))
warm.close()
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
before = memory("VmRSS")
engine = build(spec)
for _ in range(2):
    step(engine, DPO(beta=0.1, label_smoothing=0.0))
moments = sum(v.nbytes for s in engine.optimizer.optimizer.state.values() for v in s.values())
print(memory("VmHWM") - before, moments, sum(p.nbytes for p in engine.weights.values()))
"""


def measure(how: str) -> list[int]:
    """Return the peak KiB of two steps above the start, the bytes of moments and those of trained weights."""
    command = [sys.executable, "-c", PROGRAM, how]
    root = Path(__file__).parents[4]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    return [int(word) for word in answer.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_adapter_takes_little_memory() -> None:
    full, *_ = measure("full")
    peak, moments, trained = measure("adapter")
    assert full > 5 * 4 * 4.5e6 / 1024, "two models, gradients and moments: the yardstick is real"
    assert peak < 0.6 * full, f"{peak / 1024:.0f} MiB, the whole model {full / 1024:.0f} MiB"
    assert moments == pytest.approx(2 * trained, rel=1e-3)
