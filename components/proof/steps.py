"""The steps of a proof on one rank: gradients of the first step, without and with a fault, and a curve."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from components.checkpoint.dcp import save_tensors
from components.contracts.batch import IGNORE, Batch
from components.contracts.configs import OptimizerConfig, Prepared
from components.contracts.data import BatchShard, DataLoader
from components.contracts.engine import Engine, StepResult
from components.contracts.hook import Hook, HookRun
from components.contracts.loss import Loss, LossOutput, TokenStats
from components.contracts.scheduler import SchedulerSpec
from components.engines.fsdp2 import FSDP2
from components.optimizers import AdamW, muon_in_float32
from components.rank_info import RankInfo

ONE_PROCESS = FSDP2(dp=1, default_dp=1, reshard_after_forward=False)
CHANGE = 0.01
"""Relative change of the loss by an update, to which the learning rate of a proof is adjusted. At a higher
rate, correct runs would differ by more than the accepted error of a curve, because the rounding of gradients
near 0 changes the signs of updates of Adam. At a lower one a wrong optimizer would not show."""
SCALE = 2.0**30
FIRST_STEP = AdamW(lr=SCALE**2, betas=(0.0, 0.0), eps=SCALE, weight_decay=0.0, max_grad_norm=None)
"""An optimizer whose first update is ``-SCALE * gradient``, up to fp32's rounding, on every engine."""


class PerMicrobatch:
    """The control of a proof: a loss with a known fault, which the comparison of gradients must detect.

    It divides by the number of labels of each micro-batch, so gradients depend on ``run.micro_batch_size``.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss, self.kind, self.requires, self.reference = loss, loss.kind, loss.requires, loss.reference
        self.counts, self.prepare = loss.counts, loss.prepare

    def weights(self, batch: Batch) -> None:
        """Return None, so that the engine calls the loss."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        labels = max(int((batch.labels != IGNORE).sum()), 1)
        return LossOutput({name: term / labels for name, term in self.loss(stats, batch).terms.items()})


@dataclass(frozen=True)
class ProofRun:
    """The components, the data and the steps of a proof on one rank."""

    build: Callable[[OptimizerConfig], Engine]
    optimizer: OptimizerConfig
    scheduler: SchedulerSpec
    loss: Loss
    data: Prepared
    micro_batch_size: int
    hooks: Sequence[Hook]
    observed: Callable[[Engine], HookRun]
    """Function that returns the run that the hooks observe."""
    steps: int
    vocabulary: int

    def peak_lr(self) -> float:
        """Return the learning rate at which the first update changes the loss of its batch by ``CHANGE``.

        It is an estimate from one update at the rate of ``optimizer``.
        """
        engine, lr = self.build(self.optimizer), self.optimizer.lr
        before, after = (self.step(engine, self.loss, 0, lr).loss for _ in range(2))
        engine.close()
        change = abs(after / before - 1) if before else 0.0
        return lr * min(max(CHANGE / change, 1e-3), 1e3) if 0 < change < math.inf else lr

    def take(self, folder: Path, peak: float) -> None:
        """Write to ``folder`` the weights before and after the first step, and the losses of several steps.

        The folder ``gradients`` has these weights for the loss itself, ``control`` for ``PerMicrobatch``.
        ``curve.json`` has a loss and a gradient norm for each step; ``peak`` is its peak learning rate. Muon
        orthogonalises in float32.
        """
        self.first_step(self.loss, folder / "gradients")
        self.first_step(PerMicrobatch(self.loss), folder / "control")
        total = self.data.num_steps
        # From the whole schedule, because the first rates of a warmup would leave the weights as they are.
        places = [int((step + 0.5) / self.steps * total) for step in range(self.steps)]
        rates = [self.scheduler.lr(place, peak=peak, total_steps=total) for place in places]
        with muon_in_float32():
            curve = self.curve(rates)
        if RankInfo.read().rank == 0:
            (folder / "curve.json").write_text(json.dumps(curve))

    def curve(self, rates: Sequence[float]) -> list[tuple[float, float]]:
        """Train one step with each of ``rates`` while the hooks observe; return losses and gradient norms."""
        engine = self.build(self.optimizer)
        run = self.observed(engine)
        state = run.state
        for hook in self.hooks:
            hook.begin(run)
        found = []
        for number, lr in enumerate(rates):
            result = self.step(engine, self.loss, number, lr, run)
            stats = self.loader(engine).stats(number)
            state.step += 1
            state.num_samples += stats.num_samples
            state.num_tokens += stats.num_tokens
            state.skipped += result.skipped
            for hook in self.hooks:
                hook.after_step(run, result, stats)
            found.append((result.loss, result.grad_norm))
        engine.close()
        return found

    def first_step(self, loss: Loss, folder: Path) -> None:
        engine = self.build(FIRST_STEP)
        save_tensors(folder / "before", engine.tensors(model_only=True))
        self.step(engine, loss, 0, FIRST_STEP.lr)
        save_tensors(folder / "after", engine.tensors(model_only=True))
        engine.close()

    def loader(self, engine: Engine) -> DataLoader:
        shard = BatchShard(self.data.global_batch_size, self.micro_batch_size, engine.dp_rank, engine.dp_size)
        return self.data.train_loader(shard)

    def step(
        self, engine: Engine, loss: Loss, number: int, lr: float, run: HookRun | None = None
    ) -> StepResult:
        """Take a step on global batch ``number``, whose gradients the hooks observe if ``run`` is given."""
        batches = [self.small(batch) for batch in self.loader(engine).microbatches(number)]
        given: Sequence[Batch] = loss.prepare(batches, engine)
        engine.begin_train_step(given, loss)
        engine.train_microbatches(given, loss, last=True)

        def observe() -> None:
            if run is not None:
                for hook in self.hooks:
                    hook.before_update(run)

        return engine.finish_train_step(lr, before_update=observe)

    def small(self, batch: Batch) -> Batch:
        """Return ``batch`` with token ids modulo the vocabulary of the small model."""
        labels = batch.labels.where(batch.labels == IGNORE, batch.labels % self.vocabulary)
        return replace(batch, input_ids=batch.input_ids % self.vocabulary, labels=labels)
