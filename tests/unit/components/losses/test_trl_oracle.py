"""DPO, its variants and the reference-free losses have the losses and metrics of TRL on eight pairs."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from components.contracts.engine import EngineOptions
from components.contracts.loss import Loss
from components.data.tokenizer import PATH
from components.engines.fsdp2 import FSDP2
from components.losses import CPO, DPO, ORPO
from components.losses.preference_formulas import PAIR_LOSSES
from components.models import ModelSpec
from components.reference.source import resolve_reference
from runner.training.own_hooks import SyncReference
from tests.oracle import (
    OPTIMIZER,
    OPTIONS,
    Answer,
    Row,
    other_model,
    our_steps,
    packed,
    their_steps,
    tiny_model,
)

trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[test]')")
datasets = pytest.importorskip("datasets")

STEPS = 3
REWARDS = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies"))
METRICS = (*REWARDS, "logps/chosen", "logps/rejected")
ROWS = [
    {
        "prompt": f"What does `{name}` do?",
        "chosen": f" It {verb} what it is given" + ", one by one" * (index % 3) + ".",
        "rejected": " Nobody knows" + ", not even the author" * (index % 4) + ".",
    }
    for index, (name, verb) in enumerate(
        zip(
            ("zip", "sorted", "open", "print", "sum", "filter", "repr", "hash"),
            ("pairs", "orders", "reads", "shows", "adds", "drops", "spells", "numbers"),
            strict=True,
        )
    )
]


def assert_same(ours: list[Row], theirs: list[Row], bound: float = 1e-4) -> None:
    assert len(ours) == len(theirs) >= STEPS
    assert abs(theirs[-1]["loss"] - theirs[0]["loss"]) > 1e-2, "it learns, or equality would prove little"
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=bound, abs=bound), name


def steps(loss: Loss, pairs: list[Answer], num_steps: int = STEPS) -> list[Row]:
    """Take steps in micro-batches of three, three and two pairs, whose sums and counts must add up."""
    return our_steps(loss, [packed(pairs[i : i + 6]) for i in range(0, len(pairs), 6)], num_steps)


def options(folder: Path) -> dict[str, Any]:
    return OPTIONS | {"output_dir": str(folder), "per_device_train_batch_size": len(ROWS)}


# ---- with a reference


class OfTRL:
    """One DPOTrainer for every kind of loss, because building it (it tokenises) takes longer than steps."""

    def __init__(self, folder: Path) -> None:
        self.trainer = trl.DPOTrainer(
            model=tiny_model(),
            ref_model=other_model(),
            args=trl.DPOConfig(
                beta=0.1, loss_type=["sigmoid"], use_weighting=True, max_steps=STEPS, **options(folder)
            ),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=AutoTokenizer.from_pretrained(PATH),
        )
        self.batch = next(iter(self.trainer.get_train_dataloader()))
        self.pairs = [
            (row["prompt_ids"], row[f"{side}_ids"])
            for row in self.trainer.train_dataset
            for side in ("chosen", "rejected")
        ]

    def steps(self, num_steps: int = STEPS, **settings: Any) -> list[Row]:
        trainer = self.trainer
        plain = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "label_smoothing": 0.0, "ld_alpha": None}
        plain |= {"use_weighting": False}
        for name, value in (plain | {"f_divergence_type": "reverse_kl", "beta": 0.1} | settings).items():
            assert hasattr(trainer, name), name
            setattr(trainer, name, value)
        return their_steps(trainer.model, self._step, num_steps)

    def _step(self) -> tuple[Tensor, Mapping[str, float]]:
        loss = self.trainer.compute_loss(self.trainer.model, self.batch)
        found = self.trainer._metrics["train"]
        return loss, {name: found[name][-1] for name in METRICS}


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> OfTRL:
    return OfTRL(tmp_path_factory.mktemp("dpo"))


SMOOTHED = {"robust": 0.2, "exo_pair": 1e-3}
DIVERGENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward_kl": ({"f_divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
    "js_divergence": ({"f_divergence": "js_divergence"}, {"f_divergence_type": "js_divergence"}),
    "alpha_divergence": (
        {"f_divergence": "alpha_divergence", "alpha_divergence_coef": 0.3},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    ),
    "alpha of one": (
        {"f_divergence": "alpha_divergence", "alpha_divergence_coef": 1.0},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    ),
    "js of ipo": (
        {"f_divergence": "js_divergence", "loss": "ipo"},
        {"f_divergence_type": "js_divergence", "loss_types": ["ipo"]},
    ),
    "ld_alpha": ({"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
    "ld_alpha of ipo": ({"ld_alpha": 0.0, "loss": "ipo"}, {"ld_alpha": 0.0, "loss_types": ["ipo"]}),
    "rpo_alpha": ({"rpo_alpha": 0.5}, {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "beta": ({"beta": 0.5}, {"beta": 0.5}),
}
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mpo": (
        {"loss": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    "without weights": (
        {"loss": ("ipo", "robust"), "label_smoothing": 0.2},
        {"loss_types": ["ipo", "robust"], "loss_weights": [1.0, 1.0], "label_smoothing": 0.2},
    ),
    "sigmoid with a smoothed loss": (
        {"loss": ("sigmoid", "sigmoid_norm", "exo_pair"), "label_smoothing": 0.2},
        {"loss_types": ["sigmoid", "sigmoid_norm", "exo_pair"], "loss_weights": [1.0] * 3}
        | {"label_smoothing": 0.2},
    ),
    "wpo": ({"wpo": True}, {"use_weighting": True}),
    "wpo of a list": (
        {"wpo": True, "loss": ("bco_pair", "ipo"), "loss_weights": (0.3, 0.5)},
        {"use_weighting": True, "loss_types": ["bco_pair", "ipo"], "loss_weights": [0.3, 0.5]},
    ),
}


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_every_kind_of_dpo(dpo: OfTRL, kind: Any) -> None:
    eps = SMOOTHED.get(kind, 0.0)
    expected = dpo.steps(loss_types=[kind], label_smoothing=eps)
    assert_same(steps(DPO(beta=0.1, label_smoothing=eps, loss=kind), dpo.pairs), expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_option_of_dpo(dpo: OfTRL, name: str) -> None:
    ours, theirs = DIVERGENCES[name]
    loss = DPO(**{"beta": 0.1, "label_smoothing": 0.0} | ours)
    expected = dpo.steps(**theirs)
    if "ld_alpha" in ours:  # TRL reports weighted log-probabilities, and we report unweighted ones
        expected = [{name: row[name] for name in ("loss", *REWARDS)} for row in expected]
    assert_same(steps(loss, dpo.pairs), expected)


@pytest.mark.parametrize("name", COMBINED)
def test_lists_of_losses_and_weighted_pairs_over_five_steps(dpo: OfTRL, name: str) -> None:
    ours, theirs = COMBINED[name]
    assert_same(steps(DPO(**ours), dpo.pairs, 5), dpo.steps(5, **theirs), 1e-5)


def losses_of_train(folder: Path, **config: Any) -> list[float]:
    """Return the losses of a DPOTrainer's ``train()``, with its own optimizer and loop."""
    losses: list[float] = []

    class Recording(trl.DPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    Recording(
        model=tiny_model(),
        ref_model=other_model(),
        args=trl.DPOConfig(beta=0.1, **options(folder) | config),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(PATH),
    ).train()
    return losses


def test_the_trainer_takes_the_steps_that_are_compared(dpo: OfTRL, tmp_path: Path) -> None:
    """``train()`` itself gives the same losses."""
    losses = losses_of_train(tmp_path, loss_type=["ipo"], max_steps=STEPS)
    got = steps(DPO(beta=0.1, loss="ipo"), dpo.pairs)
    assert [row["loss"] for row in got] == pytest.approx(losses, rel=1e-4)


def test_a_reference_that_follows_the_policy(dpo: OfTRL, tmp_path: Path) -> None:
    """TR-DPO: five steps of TRL's ``train()`` with ``sync_ref_model``, and of an engine with our hook."""
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}
    losses = losses_of_train(tmp_path, max_steps=5, **synced)
    models = []
    for name, made in (("policy", tiny_model()), ("reference", other_model())):
        made.save_pretrained(tmp_path / name)
        models.append(ModelSpec(path=str(tmp_path / name), init="pretrained"))
    loss = DPO(beta=0.1, sync_reference_every=2, sync_reference_mixup=0.7)
    source = resolve_reference(loss, models[0])
    fp32 = EngineOptions(
        torch.float32, "cpu", reference="frozen", reference_model=models[1], sync_reference=True
    )
    engine = FSDP2(dp=1, default_dp=1, reshard_after_forward=True).build(models[0], OPTIMIZER, fp32)
    run, hook = SimpleNamespace(engine=engine, state=SimpleNamespace(step=0)), SyncReference(source=source)
    found = []
    for step in range(5):
        batches = loss.prepare([packed(dpo.pairs[:6]), packed(dpo.pairs[6:])], engine)
        engine.begin_train_step(batches, loss)
        engine.train_microbatches(batches, loss, last=True)
        result = engine.finish_train_step(OPTIMIZER.lr)
        run.state.step = step + 1
        hook.after_step(run, result, None)  # type: ignore[arg-type]
        found.append(result.loss)
    engine.close()
    assert found == pytest.approx(losses, rel=1e-5)


# ---- without a reference


class ReferenceFree:
    """A CPOTrainer or an ORPOTrainer, with prompts of one token.

    TRL's ORPO includes the likelihood of prompts, and no position predicts a first token.
    """

    def __init__(self, folder: Path, name: str) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        module = __import__(f"trl.experimental.{name}", fromlist=[name])
        title = name.upper()
        tokenizer = AutoTokenizer.from_pretrained(PATH)
        self.trainer = getattr(module, f"{title}Trainer")(
            model=tiny_model(),
            args=getattr(module, f"{title}Config")(beta=0.1, max_steps=STEPS, **options(folder)),
            train_dataset=datasets.Dataset.from_list([row | {"prompt": "?"} for row in ROWS]),
            processing_class=tokenizer,
        )
        self.batch = next(iter(self.trainer.get_train_dataloader()))
        self.pairs = [self._answer(row, side) for row in self.rows() for side in ("chosen", "rejected")]

    def rows(self) -> list[dict[str, Any]]:
        return list(self.trainer.train_dataset)

    @staticmethod
    def _answer(row: Mapping[str, Any], side: str) -> Answer:
        ids, labels = row[f"{side}_input_ids"], row[f"{side}_labels"]
        prompt = sum(label == -100 for label in labels)
        assert prompt == 1
        return ids[:prompt], ids[prompt:]

    def steps(self, **settings: Any) -> list[Row]:
        for name, value in settings.items():
            assert hasattr(self.trainer, name) or name == "simpo_gamma", name
            setattr(self.trainer, name, value)
        return their_steps(self.trainer.model, self._step, STEPS)

    def _step(self) -> tuple[Tensor, Mapping[str, float]]:
        loss, found = self.trainer.get_batch_loss_metrics(self.trainer.model, self.batch)
        return loss, {name: float(found[name]) for name in METRICS}


@pytest.fixture(scope="module")
def cpo(tmp_path_factory: pytest.TempPathFactory) -> ReferenceFree:
    return ReferenceFree(tmp_path_factory.mktemp("cpo"), "cpo")


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "sigmoid", "cpo_alpha": 1.0},
        {"loss": "sigmoid", "cpo_alpha": 0.0, "label_smoothing": 0.1},
        {"loss": "hinge", "cpo_alpha": 0.5},
        {"loss": "ipo", "cpo_alpha": 1.0},
        {"loss": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2, "beta": 2.0},
        {"loss": "simpo", "cpo_alpha": 1.0, "beta": 2.0, "label_smoothing": 0.2},
    ],
    ids=str,
)
def test_every_kind_of_cpo(cpo: ReferenceFree, settings: dict[str, Any]) -> None:
    theirs = {"beta": 0.1, "simpo_gamma": 0.5, "label_smoothing": 0.0} | settings
    expected = cpo.steps(loss_type=theirs.pop("loss"), **theirs)
    assert_same(steps(CPO(**{"beta": 0.1} | settings), cpo.pairs), expected)


def test_orpo(tmp_path: Path) -> None:
    orpo = ReferenceFree(tmp_path, "orpo")
    assert_same(steps(ORPO(beta=0.3), orpo.pairs), orpo.steps(beta=0.3))
