"""A hook that keeps an exponential moving average of the weights."""

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.adapters import LoRA
from components.checkpoint.async_save import view_of, wrap_like
from components.checkpoint.dcp import saved_keys
from components.checkpoint.folder import read_meta
from components.checkpoint.to_hf import CheckpointModel
from components.contracts.engine import Engine, StepResult
from components.contracts.errors import ConfigError
from components.contracts.hook import Hook, HookRun
from components.models import ModelSpec

RESERVED = (
    *("base", "checkpoints", "completions", "export", "lock", "logs", "profile", "reference", "stream"),
    *("tensorboard", "wandb"),
)
"""Folders of a run that a hook may not be named after, because the average is in a folder of its name."""
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EMA(Hook):
    """Averages the trained weights over the steps, and exports the average at the end of the run.

    The average starts as the initial weights. After a step that was not skipped it becomes ``decay`` times
    itself plus ``1 - decay`` times the weights, in fp32. Every rank averages its own shards. Checkpoints hold
    the average, and any layout can resume from it.
    """

    weight_copies: ClassVar[int] = 1
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"hook.ema.decay: must be at least 0 and below 1, got {self.decay}.")

    def check(self, name: str) -> None:
        if name in RESERVED:
            raise ConfigError(f"hook.{name}: is a folder of the run, and EMA writes to one; rename it.")

    def begin(self, run: HookRun) -> None:
        if not isinstance(run.adapter, LoRA | None):
            raise ConfigError("hook.ema: cannot export the average of an adapter of your own; leave it out.")
        # A run that was killed before its export has no further step.
        self.saved = run.resumed_from if has_average(run.resumed_from, run.name) else None
        self.average: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        """The memory of the averages, by the name of the first weight in it. Fused weights share theirs."""
        first: dict[Hashable, str] = {}
        for name, weight in weights(run.engine).items():
            owner = first.setdefault(view_of(plain_shard(weight)), name)
            if owner == name:
                self.copies[name] = plain_shard(weight).clone()
            self.average[name] = wrap_like(weight, self.copies[owner])

    @torch.no_grad()
    def after_step(self, run: HookRun, result: StepResult, *_: object) -> None:
        if not result.skipped:
            found = weights(run.engine)
            for name, copy in self.copies.items():
                copy.lerp_(plain_shard(found[name]), 1 - self.decay)

    def after_save(self, run: HookRun, checkpoint: Path) -> None:  # noqa: ARG002
        self.saved = checkpoint

    def end(self, run: HookRun, *, completed: bool) -> None:
        """Export the average from the last checkpoint if the run completed; every rank calls this method.

        The export is in the run folder, in a folder with the name of the hook.
        """
        if not completed:
            return
        if self.saved is None:
            log.info("hook.%s: no checkpoint has its average, so none is exported", run.name)
            return
        assert isinstance(run.model, ModelSpec)
        assert isinstance(run.adapter, LoRA | None)
        folder, kind = run.folder / run.name, f"hook/{run.name}"
        trained = CheckpointModel(run.model, run.adapter, self.saved, run.folder, run.seed, None, kind)
        try:
            if run.adapter is not None:
                trained.export_adapter(folder, run.dtype, writes=run.is_main)
            elif run.is_main:
                trained.export_model(folder, run.dtype)
        finally:  # also if it fails: the other ranks wait there
            run.engine.barrier()
        saved = read_meta(self.saved).state["step"]
        if saved < run.state.step:  # checkpoint.on_error=continue, and the last save has failed
            log.warning("hook.%s: the average is that of step %d, the last that was saved", run.name, saved)
        log.info("step %d  exported the average to %s", saved, folder)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.average


def has_average(checkpoint: Path | None, hook: str) -> bool:
    return checkpoint is not None and any(key.startswith(f"hook/{hook}/") for key in saved_keys(checkpoint))


def weights(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's shards of the trained weights, by name."""
    tensors = engine.tensors(model_only=True)
    return {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}


def plain_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor)
