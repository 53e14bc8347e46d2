"""Events of any subclass of transformers.Trainer."""

from typing import Any

import torch
import transformers

from benchmarks.baselines.events import Events

IGNORE = -100


class StepEvents(transformers.TrainerCallback):
    """A callback for the trainer that writes an event after each optimizer step.

    It counts tokens by wrapping ``Trainer.training_step``, which all subclasses call, because some programs
    offer no argument to change the trainer that they build.
    """

    def __init__(self, pad_id: int) -> None:
        self.events, self.pad_id = Events(), pad_id
        self.tokens, self.labels, self.loss = 0, 0, torch.zeros(())
        inner = transformers.Trainer.training_step

        def training_step(trainer: Any, model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
            self.count(inputs)
            loss = inner(trainer, model, inputs, *rest, **more)
            self.loss += loss.detach()
            return loss

        transformers.Trainer.training_step = training_step

    def count(self, inputs: dict[str, Any]) -> None:
        """Count the tokens and labels of one micro-batch, without padding."""
        ids = inputs["input_ids"]
        self.tokens += int((ids != self.pad_id).sum())
        if "labels" in inputs:
            self.labels += int((inputs["labels"] != IGNORE).sum())
        else:
            self.labels += int(inputs["completion_mask"].sum())

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        self.events.step(tokens=self.tokens, labels=self.labels, loss=self.loss.item())
        self.tokens, self.labels, self.loss = 0, 0, torch.zeros(())
