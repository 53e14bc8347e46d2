"""KTO equals an independent implementation of its formula, and three steps of TRL's KTOTrainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from components.contracts.batch import KL_COMPLETION, Batch
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.data.tokenizer import PATH
from components.losses import KTO
from tests.oracle import (
    OPTIONS,
    Answer,
    other_model,
    our_steps,
    packed,
    their_steps,
    tiny_model,
)
from tests.unit.components.losses.test_preference import LAYOUTS, LENGTHS, empty, rows

PLAIN: dict[str, Any] = {"beta": 0.1, "loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
OTHER = 0.7
LABELS = [1, 2, 0, 2, 1, 2]
"""Labels of ``rows``: two desirable answers and an undesirable one, each followed by a mismatched one."""


def rows_for_kl() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return ``rows`` with a policy so much likelier than the reference that KL is above 0."""
    return [(labels, 0.4 * logps, ref) for labels, logps, ref in rows()]


def make(layout: str) -> tuple[Batch, Tensor, Tensor]:
    """Return a micro-batch and the log-probabilities of the policy and the reference."""
    batch, logps, ref = LAYOUTS[layout](list(zip(*rows_for_kl(), strict=True)))
    return replace(batch, sequence_labels=torch.tensor(LABELS)), logps, ref


class Engine:
    """A fake engine that returns given values; another data-parallel rank has one log-ratio, ``OTHER``."""

    def __init__(self, logps: Tensor, ref: Tensor, batch: Batch, *, last_stage: bool = True) -> None:
        self.tables = {False: logps, True: ref}
        self.batch, self.last_stage = batch, last_stage
        self.asked: list[int] = []

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        self.asked.append(sum(int((b.seqlens > 0).sum()) for b in microbatches))
        if not self.last_stage:
            return None
        return [self._look_up(batch, self.tables[reference]) for batch in microbatches]

    def _look_up(self, batch: Batch, table: Tensor) -> Tensor:
        """Return the values of a batch, which holds all sequences or only the mismatched ones."""
        if batch.labels.shape == self.batch.labels.shape:
            return table
        assert self.batch.sequence_labels is not None
        keep = self.batch.sequence_labels == KL_COMPLETION
        bare = replace(self.batch, ref_logps=table).select(keep)
        assert torch.equal(bare.labels, batch.labels)
        assert bare.ref_logps is not None
        return bare.ref_logps

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        return [value + more for value, more in zip(values, (OTHER, 1), strict=True)]


def by_hand(loss: KTO) -> tuple[Tensor, float, list[Tensor], list[Tensor]]:
    """Return the sum, KL, log-ratios and gradients, sequence by sequence in float64."""
    data = [tuple(value.double() for value in row[1:]) for row in rows_for_kl()]
    policy = [logps.clone().requires_grad_() for logps, _ in data]
    ratios = [logps.sum() - ref.sum() for logps, (_, ref) in zip(policy, data, strict=True)]
    kl = (
        max(float(sum(ratios[i].detach() for i in (1, 3, 5)) + OTHER) / 4, 0.0) if loss.loss == "kto" else 0.0
    )
    total = torch.zeros((), dtype=torch.float64)
    for index in (0, 2, 4):
        sign = 1 if LABELS[index] == 1 else -1
        weight = loss.desirable_weight if sign == 1 else loss.undesirable_weight
        total = total + weight * (1 - torch.sigmoid(sign * loss.beta * (ratios[index] - kl)))
    total.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy]
    return total.detach(), kl, ratios, grads


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_the_formula(layout: str, kind: Any) -> None:
    loss = KTO(**PLAIN | {"loss": kind, "beta": 0.4, "desirable_weight": 0.7, "undesirable_weight": 1.3})
    batch, logps, ref = make(layout)
    engine = Engine(logps, ref, batch)
    blank = replace(empty(), pair_index=None, ref_logps=None, sequence_labels=torch.tensor([-1]))
    [prepared] = loss.prepare([batch], engine)  # type: ignore[arg-type]
    total, kl, ratios, grads = by_hand(loss)
    assert kl > 0.5 or kind != "kto", "otherwise it is not told from none"
    assert prepared.constants["kl"] == pytest.approx(kl, rel=1e-6)
    assert loss.counts(prepared) == {"loss": 3}
    assert loss.counts(blank) == {"loss": 0}
    assert engine.asked == ([6, 3] if kind == "kto" else [6])
    answers = replace(batch, ref_logps=logps).select(torch.tensor(LABELS) != KL_COMPLETION).ref_logps
    assert answers is not None
    answers.requires_grad_()
    output = loss(TokenStats(answers), prepared)
    output.terms["loss"].backward()
    assert output.terms["loss"].item() == pytest.approx(total.item(), rel=1e-6)
    assert answers.grad is not None
    lengths = [LENGTHS[i] for i in (0, 2, 4)]
    mine = answers.grad[0].split(lengths) if layout == "packed" else answers.grad
    for index, length, grad in zip((0, 2, 4), lengths, mine, strict=True):
        torch.testing.assert_close(grad[:length].double(), grads[index], rtol=1e-5, atol=1e-7)
    rewards, count = output.metrics["rewards/chosen"]
    assert count == 2
    assert float(rewards) == pytest.approx(0.4 * float((ratios[0] + ratios[4]).detach()), rel=1e-5)
    if kind == "kto":
        assert float(output.metrics["kl"][0] / output.metrics["kl"][1]) == pytest.approx(kl, rel=1e-6)


def test_a_negative_estimate_of_kl_is_zero() -> None:
    batch, logps, ref = make("packed")
    [prepared] = KTO(**PLAIN).prepare([batch], Engine(ref, logps, batch))  # type: ignore[arg-type]
    assert prepared.constants == {"kl": 0.0}


def test_off_the_last_stage_the_answers_are_selected_too() -> None:
    batch, logps, ref = make("padded")
    engine = Engine(logps, ref, batch, last_stage=False)
    [prepared] = KTO(**PLAIN).prepare([batch], engine)  # type: ignore[arg-type]
    assert engine.asked == [6, 3], "every stage takes part in both passes"
    assert (len(prepared.labels), prepared.ref_logps) == (3, None)


def test_a_reference_that_is_there_is_kept() -> None:
    batch, logps, ref = make("packed")
    engine = Engine(logps, torch.zeros_like(ref), batch)
    [prepared] = KTO(**PLAIN).prepare([replace(batch, ref_logps=ref)], engine)  # type: ignore[arg-type]
    assert engine.asked == [3], "the policy alone"
    assert prepared.constants["kl"] == pytest.approx(by_hand(KTO(**PLAIN))[1])


def test_an_empty_microbatch_adds_nothing() -> None:
    loss = KTO(**PLAIN)
    blank = replace(empty(), pair_index=None, sequence_labels=torch.tensor([-1]), constants={"kl": 0.3})
    logps = torch.zeros(1, 1, requires_grad=True)
    output = loss(TokenStats(logps * 1), blank.select(torch.tensor([True])))
    output.terms["loss"].backward()
    assert output.terms["loss"].item() == 0
    assert all(count == 0 and float(value) == 0 for value, count in output.metrics.values())
    assert logps.grad is not None
    assert not logps.grad.any()


@pytest.mark.parametrize(
    ("option", "value"),
    [("beta", 0.0), ("desirable_weight", -1.0), ("undesirable_weight", float("inf"))],
)
def test_values_that_make_no_sense_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"stage.{option}"):
        KTO(**PLAIN | {option: value})


# ---- TRL

WORDS = ("zip", "sorted", "open", "print", "sum", "filter")
ROWS = [
    {
        "prompt": f"What does `{word}` do?",
        "completion": " It works" + ", one by one" * (index % 3) + ".",
        "label": index % 3 != 1,
    }
    for index, word in enumerate(WORDS)
]
METRICS = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")


class OfTRL:
    """A KTOTrainer over ``ROWS`` and its tokenised answers, each followed by its mismatched one."""

    def __init__(self, folder: Path) -> None:
        trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[test]')")
        datasets = pytest.importorskip("datasets")
        size = {"output_dir": str(folder), "per_device_train_batch_size": len(ROWS)}
        self.trainer = trl.KTOTrainer(
            model=tiny_model(),
            ref_model=other_model(),
            args=trl.KTOConfig(beta=0.1, max_steps=3, **OPTIONS | size),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=AutoTokenizer.from_pretrained(PATH),
        )
        self.batch = next(iter(self.trainer.get_train_dataloader()))
        made = list(self.trainer.train_dataset)
        keys = ("completion_ids", "KL_completion_ids")
        self.answers: list[Answer] = [(row["prompt_ids"], row[key]) for row in made for key in keys]
        self.labels = [label for row in made for label in (int(row["label"]), KL_COMPLETION)]

    def step(self) -> tuple[Tensor, Mapping[str, float]]:
        loss = self.trainer.compute_loss(self.trainer.model, self.batch)
        found = self.trainer._metrics["train"]
        return loss, {name: found[name][-1] for name in METRICS}

    def microbatches(self, size: int) -> list[Batch]:
        starts = range(0, len(self.answers), size)
        labels = [torch.tensor(self.labels[i : i + size]) for i in starts]
        batches = [replace(packed(self.answers[i : i + size]), pair_index=None) for i in starts]
        return [replace(b, sequence_labels=label) for b, label in zip(batches, labels, strict=True)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> OfTRL:
    return OfTRL(tmp_path_factory.mktemp("kto"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.5, "desirable_weight": 0.6, "undesirable_weight": 1.4},
        {"loss": "apo_zero_unpaired", "undesirable_weight": 2.0},
    ],
    ids=str,
)
def test_three_steps_equal_trl(trainer: OfTRL, settings: dict[str, Any]) -> None:
    chosen = PLAIN | settings
    for name, value in (chosen | {"calculate_KL": chosen["loss"] == "kto"}).items():
        setattr(trainer.trainer, "loss_type" if name == "loss" else name, value)
    expected = their_steps(trainer.trainer.model, trainer.step, 3)
    got = our_steps(KTO(**chosen), trainer.microbatches(4), 3)
    if chosen["loss"] == "kto":
        assert max(row["kl"] for row in expected) > 0.1, "or it would not be told from none"
    assert abs(expected[-1]["loss"] - expected[0]["loss"]) > 1e-3
    for mine, other in zip(got, expected, strict=True):
        assert {"kl": 0.0} | mine == pytest.approx(other, rel=1e-4, abs=1e-4)
