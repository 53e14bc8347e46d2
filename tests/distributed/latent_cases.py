"""Rank functions of test_latent_attention.py that write and read a folder."""

from pathlib import Path

from components.checkpoint.dcp import save_tensors
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed.cases import make_engine, next_token
from tests.distributed.megatron_lora_cases import run_on

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def leave(on: FSDP2 | Megatron, family: str, folder: Path) -> Curve:
    """Export the model, save a checkpoint after two steps, and return the next two steps."""
    engine = make_engine(family, on=on)
    engine.export(folder / "export")
    run_on(engine, next_token(), 2)
    save_tensors(folder / "checkpoint", engine.tensors())
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after


def go_on(on: FSDP2 | Megatron, family: str, folder: Path) -> Curve:
    """Return the two steps that follow the checkpoint in ``folder``."""
    engine = make_engine(family, on=on)
    engine.load(folder / "checkpoint")
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after
