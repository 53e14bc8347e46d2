"""The rehearsal of one rank: build its engine, run train steps, and copy its state as for a checkpoint."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from components.checkpoint.async_save import HostCopy
from components.checkpoint.flat_shard import FlatShard
from components.contracts.configs import ModelConfig, OptimizerConfig, Prepared
from components.contracts.data import BatchShard
from components.contracts.engine import Engine, EngineOptions
from components.contracts.hook import Hook, HookRun
from components.contracts.loss import Loss
from components.contracts.parallelism import ParallelismSpec
from components.engines.megatron import Megatron
from components.models import ModelSpec
from components.rehearsal import compiled_kernels, fake_cuda, fake_groups, fake_tensors
from components.rehearsal.fake_weights import FakeWeightsModel
from components.rehearsal.memory_components import assign_state
from components.rehearsal.mode import RehearsalMode


@dataclass(frozen=True)
class RehearsedRun:
    """The components and the data that one rank of a run builds and trains."""

    parallelism: ParallelismSpec
    model: ModelConfig
    optimizer: OptimizerConfig
    options: EngineOptions
    loss: Loss
    data: Prepared
    global_batch_size: int
    micro_batch_size: int
    hooks: Sequence[Hook]
    """Hooks that keep copies of the weights."""
    has_ref_logps: bool
    """Whether the batches of the run come with precomputed log-probabilities of the reference model."""
    observed: Callable[[Engine], HookRun]
    """Function that returns the run that hooks observe."""


def install(gpu: fake_cuda.Gpu, rank: int, world_size: int) -> RehearsalMode:
    """Turn this process into one rank of ``world_size`` with a ``gpu`` each; return the mode to enter."""
    mode = RehearsalMode()
    fake_cuda.install(gpu, mode)
    fake_tensors.install(mode)
    # The last pipeline stage sends the mean loss and the number of labels to the others.
    fake_groups.install(rank, world_size, received=({"loss": 1.0}, 1))
    # A fake tensor cannot become a FlatShard. Only the writer of a checkpoint needs one.
    flat_shard: Any = FlatShard
    flat_shard.of = staticmethod(lambda flat, _whole, _boxes: flat)
    return mode


def rehearse(run: RehearsedRun, mode: RehearsalMode, steps: int) -> dict[str, float]:
    """Build the engine and run ``steps`` train steps, then copy its tensors as for a checkpoint.

    Afterwards ``mode`` contains the memory of the whole rehearsal, and waits, traffic and arithmetic of the
    last step and of the copy. The result is the duration of the build and of each step, in seconds.
    """
    took: dict[str, float] = {}
    options = replace(run.options, reference_model=fake(run.options.reference_model, mode))
    with mode:
        began = time.perf_counter()
        engine = rehearsable(run.parallelism).build(fake(run.model, mode), run.optimizer, options)
        compiled_kernels.install(mode)
        took["build"] = time.perf_counter() - began
        shard = BatchShard(run.global_batch_size, run.micro_batch_size, engine.dp_rank, engine.dp_size)
        loader = run.data.train_loader(shard)
        hook_run = run.observed(engine)
        for hook in run.hooks:
            hook.begin(hook_run)
        assign_state(mode.memory, engine, run.hooks)
        for step in range(steps):
            mode.count_anew()
            began = time.perf_counter()
            batches = loader.microbatches(step)
            if run.has_ref_logps:
                batches = [replace(batch, ref_logps=torch.zeros(batch.labels.shape)) for batch in batches]
            batches = [batch.pin_memory() for batch in batches]
            mode.step = "reference"
            batches = list(run.loss.prepare(batches, engine))
            mode.step = "counts"
            engine.begin_train_step(batches, run.loss)
            mode.step = "microbatches"
            engine.train_microbatches(batches, run.loss, last=True)
            assign_state(mode.memory, engine, run.hooks)
            mode.step = "update"
            result = engine.finish_train_step(run.optimizer.lr)
            for hook in run.hooks:
                hook.after_step(hook_run, result, loader.stats(step))
            if options.sync_reference:
                engine.mix_reference(0.5)
            took[f"step {step + 1}"] = time.perf_counter() - began
        assign_state(mode.memory, engine, run.hooks)
        mode.step = "save"
        HostCopy().of(engine.tensors())
    return took


def rehearsable(layout: ParallelismSpec) -> ParallelismSpec:
    """Return ``layout`` without transformer-engine, whose kernels need real tensors."""
    if not isinstance(layout, Megatron):
        return layout
    return replace(layout, transformer_impl="local", moe_permute_fusion=False)


def fake(model: Any, mode: RehearsalMode) -> Any:
    """Return ``model`` with fake weights if it is a ``ModelSpec``, or else unchanged."""
    return FakeWeightsModel.of(model, mode) if isinstance(model, ModelSpec) else model
