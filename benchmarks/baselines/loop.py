"""The hand-written loop that everything is measured against: ``python -m benchmarks.baselines.loop``.

It does what training needs and no more: packed rows, one causal attention a sequence, the head only where
there is a label, one fused AdamW. Pure torch, no options that cost time.
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
    """Weights, and the optimizer that holds them in fp32."""

    def __init__(self, model: Model, folder: Path, dtype: torch.dtype, *, lr: float, reference: bool) -> None:
        self.model = model
        loaded = load_file(folder / "model.safetensors")
        loaded.pop("lm_head.weight", None)  # tied
        # Copies: in the file, tensors are not aligned as the processor likes them.
        self.masters = {n: w.to(torch.float32, copy=True).requires_grad_() for n, w in loaded.items()}
        self.weights: dict[str, Tensor] = self.masters
        if dtype != torch.float32:
            self.weights = {n: w.detach().to(dtype).requires_grad_() for n, w in self.masters.items()}
        self.reference = {n: w.detach().clone() for n, w in self.weights.items()} if reference else None
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True
        )

    def step(self, step: Step) -> tuple[Tensor, int]:
        """Loss and labels of one optimizer step."""
        labels = torch.tensor(step.labels)
        kept = (labels != IGNORE).nonzero()[:, 0]
        loss = self.loss(step, labels, kept)
        loss.backward()
        self.update()
        return loss.detach(), len(kept)

    def loss(self, step: Step, labels: Tensor, kept: Tensor) -> Tensor:
        """``kept``: positions with a label."""
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
        """Gradients of the weights go to the fp32 masters, the result back."""
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
