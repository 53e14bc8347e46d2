"""What a checkpoint of this engine holds: tensors under names that no engine and no layout changes."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from components.checkpoint.format import load_tensors, save_tensors, saved_keys
from components.engines.megatron.runtime.optimizer import Update
from components.engines.megatron.runtime.weights import Blocks, as_dtensor

STEP = "optimizer_step"
"""Updates made so far: AdamW's bias correction counts them, and a skipped step is none."""


def save(path: Path, blocks: Blocks, update: Update, mesh: DeviceMesh, *, model_only: bool) -> None:
    """Every rank writes its blocks, replicas once; with ``model_only`` the weights alone."""
    kinds = ["model"]
    tensors: dict[str, Tensor] = {}
    if not model_only:
        update.make_moments()
        kinds += update.moments
        tensors = {STEP: torch.tensor([update.step], dtype=torch.float32), **random_states()}
    for parameter, members in blocks.items():
        for kind in kinds:
            values = update.read(parameter, kind)
            for member in members:
                if member.primary:
                    key = f"{kind}/{member.name}"
                    tensors[key] = as_dtensor(member, member.read(values).contiguous(), mesh)
    save_tensors(path, tensors)


def load(path: Path, blocks: Blocks, update: Update, mesh: DeviceMesh) -> None:
    """Restores what ``save`` of any engine wrote on any number of ranks.

    A rank that had no twin when the checkpoint was written keeps its own random streams.
    """
    update.make_moments()
    step, keys = torch.zeros(1), saved_keys(path)
    streams = {name: value for name, value in random_states().items() if name in keys}
    wholes = {
        (parameter, kind): torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        for parameter in blocks
        for kind in ("model", *update.moments)
    }
    targets: dict[str, Tensor] = {STEP: step, **streams}
    copies = []
    for (parameter, kind), values in wholes.items():
        for member in blocks[parameter]:
            part = member.read(values).contiguous()
            targets[f"{kind}/{member.name}"] = as_dtensor(member, part, mesh)
            copies.append((member, values, part))
    load_tensors(path, targets)
    for member, values, part in copies:
        member.write(values, part)
    for (parameter, kind), values in wholes.items():
        update.write(parameter, kind, values)
    update.set_step(int(step.item()))
    restore(streams)


def random_states() -> dict[str, Tensor]:
    """This rank's streams as they are now: torch's, the device's, and Megatron's by name."""
    rank = dist.get_rank()
    states = {f"rng/{rank}": torch.get_rng_state(), f"rng_cuda/{rank}": torch.cuda.get_rng_state()}
    tracked = get_cuda_rng_tracker().get_states()
    return states | {f"rng_{name}/{rank}": state for name, state in tracked.items()}


def restore(streams: dict[str, Tensor]) -> None:
    tracker, rank = get_cuda_rng_tracker(), dist.get_rank()
    tracked = tracker.get_states()
    tracker.set_states({name: streams.get(f"rng_{name}/{rank}", state) for name, state in tracked.items()})
    if f"rng/{rank}" in streams:
        torch.set_rng_state(streams[f"rng/{rank}"])
    if f"rng_cuda/{rank}" in streams:
        torch.cuda.set_rng_state(streams[f"rng_cuda/{rank}"])
