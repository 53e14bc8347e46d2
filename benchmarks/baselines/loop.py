"""The hand-written loop with which all programs are compared: ``python -m benchmarks.baselines.loop``.

It does only what training needs: packed rows, one causal attention per sequence, the head only at positions
with a label, and one fused AdamW. It is pure torch without options that cost time.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.baselines.arguments import MAX_LENGTH, parse
from benchmarks.baselines.events import Events
from benchmarks.baselines.loop_data import IGNORE, Reader, Step
from benchmarks.baselines.loop_model import EMBEDDING, CrossEntropy, LogProbs, Model, Shape, Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BETA = 0.1
BETAS = (0.9, 0.95)


class Trainer:
    """Weights, their fp32 master weights, and the optimizer."""

    def __init__(self, model: Model, folder: Path, dtype: torch.dtype, *, lr: float, reference: bool) -> None:
        self.model = model
        loaded = load_file(folder / "model.safetensors")
        loaded.pop("lm_head.weight", None)  # tied
        # The weights are copied, because tensors in the file are not aligned for fast access.
        self.masters = {n: w.to(torch.float32, copy=True).requires_grad_() for n, w in loaded.items()}
        self.weights: dict[str, Tensor] = self.masters
        if dtype != torch.float32:
            self.weights = {n: w.detach().to(dtype).requires_grad_() for n, w in self.masters.items()}
        self.reference = {n: w.detach().clone() for n, w in self.weights.items()} if reference else None
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True
        )

    def step(self, step: Step) -> tuple[Tensor, int]:
        """Take one optimizer step and return its loss and number of labels."""
        labels = torch.tensor(step.labels)
        kept = (labels != IGNORE).nonzero()[:, 0]
        loss = self.loss(step, labels, kept)
        loss.backward()
        self.update()
        return loss.detach(), len(kept)

    def loss(self, step: Step, labels: Tensor, kept: Tensor) -> Tensor:
        """Return the loss of the stage.

        ``kept`` are the positions with a label.
        """
        if self.reference is not None:
            return self.dpo(step, labels, kept)
        return self.cross_entropy(step, labels, kept)

    def cross_entropy(self, step: Step, labels: Tensor, kept: Tensor) -> Tensor:
        hidden = self.hidden(self.weights, step)
        return CrossEntropy.apply(hidden[kept], self.weights[EMBEDDING], labels[kept], 1 / len(kept))

    def dpo(self, step: Step, labels: Tensor, kept: Tensor) -> Tensor:
        assert self.reference is not None
        lengths = torch.tensor([span.length for span in step.spans])
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[kept]

        def logps(weights: Weights) -> Tensor:
            each = LogProbs.apply(self.hidden(weights, step)[kept], weights[EMBEDDING], labels[kept])
            return torch.zeros(len(lengths)).index_add(0, sequence, each)

        with torch.no_grad():
            reference = logps(self.reference)
        chosen, rejected = (logps(self.weights) - reference).unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(BETA * (chosen - rejected)).mean()

    def hidden(self, weights: Weights, step: Step) -> Tensor:
        return self.model.hidden(weights, torch.tensor(step.ids), torch.tensor(step.positions), step.spans)

    def update(self) -> None:
        """Clip the gradients, update the fp32 master weights, and copy them to the weights."""
        if self.weights is not self.masters:
            for name, weight in self.weights.items():
                assert weight.grad is not None
                self.masters[name].grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.weights is not self.masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))


def train(trainer: Trainer, steps: Iterable[Step]) -> None:
    events = Events()
    passes = 3 if trainer.reference is None else 4
    for step in steps:
        loss, labels = trainer.step(step)
        flops = trainer.model.flops(step.spans, labels, passes=passes)
        events.step(tokens=step.tokens, labels=labels, loss=loss.item(), flops=flops)


def main() -> None:
    asked = parse()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = DTYPES[asked.dtype]
    model = Model(Shape.read(asked.model), dtype, longest=MAX_LENGTH, compile=asked.compile)
    order = json.loads(asked.order.read_text()) if asked.order else None
    steps = Reader(asked.data).steps(asked.stage, share_prompt=asked.share_prompt, order=order)
    trainer = Trainer(model, asked.model, dtype, lr=asked.lr, reference=asked.stage == "dpo")
    train(trainer, steps[: asked.steps])


if __name__ == "__main__":
    main()
