"""The hand-written loop of benchmarks/baselines equals transformers."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.baselines.arguments import MAX_LENGTH
from benchmarks.baselines.loop import Trainer
from benchmarks.baselines.loop_data import IGNORE, Reader, Step
from benchmarks.baselines.loop_model import Model, Shape
from tests.peers import small_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def reference(data: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(data / "model_small", dtype="float32")


def logps(model: PreTrainedModel, step: Step) -> list[Tensor]:
    """Return the log-probabilities of the labels of every sequence, each computed by itself."""
    result = []
    for span in step.spans:
        ids, labels = (torch.tensor(x[span.begin : span.end]) for x in (step.ids, step.labels))
        kept = labels != IGNORE
        assert not kept[-1]
        assert labels[kept].equal(ids.roll(-1)[kept])
        every = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        result.append(every[kept].gather(1, labels[kept, None])[:, 0])
    return result


def trainer(data: Path, *, reference: bool = False, dtype: torch.dtype = torch.float32) -> Trainer:
    folder = data / "model_small"
    model = Model(Shape.read(folder), dtype, longest=MAX_LENGTH, compile=False)
    return Trainer(model, folder, dtype, lr=1e-3, reference=reference)


def backward(trainer: Trainer, step: Step) -> Tensor:
    """Run the backward pass, which leaves gradients in the weights, and return the loss."""
    labels = torch.tensor(step.labels)
    loss = trainer.loss(step, labels, (labels != IGNORE).nonzero()[:, 0])
    loss.backward()
    return loss.detach()


def check_gradients(trainer: Trainer, model: PreTrainedModel) -> None:
    expected = dict(model.named_parameters())
    assert trainer.weights.keys() == expected.keys()
    for name, weight in trainer.weights.items():
        found, grad = weight.grad, expected[name].grad
        assert found is not None
        assert grad is not None
        assert (found - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_loss_and_gradients_are_those_of_transformers(
    data: Path, reference: PreTrainedModel, stage: str
) -> None:
    step, *_ = Reader(data).steps(stage)
    reference.zero_grad()
    expected = -torch.cat(logps(reference, step)).mean()
    expected.backward()
    ours = trainer(data)
    assert backward(ours, step).item() == pytest.approx(expected.item(), rel=1e-6)
    check_gradients(ours, reference)


@pytest.mark.parametrize("share_prompt", [False, True])
def test_dpo_is_that_of_transformers(data: Path, reference: PreTrainedModel, share_prompt: bool) -> None:
    """The losses are equal when the policy differs from the reference model."""
    apart, *_ = Reader(data).steps("dpo")
    step, *_ = Reader(data).steps("dpo", share_prompt=share_prompt)
    ours = trainer(data, reference=True)
    assert ours.reference is not None
    with torch.no_grad():
        for name in ours.reference:
            ours.reference[name] *= 1.1
        frozen = deepcopy(reference)
        for weight in frozen.parameters():
            weight *= 1.1
        start = torch.stack([each.sum() for each in logps(frozen, apart)])
    reference.zero_grad()
    policy = torch.stack([each.sum() for each in logps(reference, apart)])
    chosen, rejected = (policy - start).unflatten(0, (-1, 2)).unbind(1)
    expected = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    expected.backward()
    assert backward(ours, step).item() == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(ours, reference)
