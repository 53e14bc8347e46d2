"""What ranks of test_latent_attention.py run with a folder between them."""

from pathlib import Path

from components.checkpoint.dcp import save_tensors
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed.cases import make_engine, next_token
from tests.distributed.megatron_lora_cases import run_on

Curve = list[tuple[float, float]]
"""(loss, grad_norm) by step."""


def leave(on: FSDP2 | Megatron, family: str, folder: Path) -> Curve:
    """Exports, then saves after two steps; the two steps that follow."""
    engine = make_engine(family, on=on)
    engine.export(folder / "export")
    run_on(engine, next_token(), 2)
    save_tensors(folder / "checkpoint", engine.tensors())
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after


def go_on(on: FSDP2 | Megatron, family: str, folder: Path) -> Curve:
    """The steps that follow the checkpoint in ``folder``."""
    engine = make_engine(family, on=on)
    engine.load(folder / "checkpoint")
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after
