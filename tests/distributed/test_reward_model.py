"""A reward model trains as by TRL's RewardTrainer on any layout, and transformers gives its scores."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.parity.parity_ranks import train
from components.data.tokenizer import PATH
from components.proof.verdict import curve_error
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from runner.launch.prepare import prepare
from tests.e2e.commands import composed
from tests.oracle import OPTIMIZER, OPTIONS, tiny_model
from tests.ranks import Ranks

trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[test]')")
datasets = pytest.importorskip("datasets")

STEPS, CENTER = 5, 0.05
METRICS = ("loss", "accuracy", "margin", "mean_reward")
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"What does `{name}` do?"}],
        "chosen": [
            {"role": "assistant", "content": f"It {verb} what it is given" + ", one by one" * (i % 3)}
        ],
        "rejected": [{"role": "assistant", "content": "Nobody knows" + ", not even the author" * (i % 4)}],
        "margin": 0.5 * (i % 3),
    }
    for i, (name, verb) in enumerate(
        zip(
            ("zip", "sorted", "open", "print", "sum", "filter", "repr", "hash"),
            ("pairs", "orders", "reads", "shows", "adds", "drops", "spells", "numbers"),
            strict=True,
        )
    )
]
PACKED = ("run.global_batch_size=1", "run.micro_batch_size=1", "data.packing=bfd")
"""All pairs in one row."""
PADDED = (f"run.global_batch_size={len(ROWS)}", "run.micro_batch_size=2", "data.packing=none")
RUNS = {
    "single": ("parallelism=single", *PACKED),
    "shared prompt": ("parallelism=single", *PACKED, "data.share_prompt=true"),
    "tp2pp2": ("parallelism=tp2pp2", "parallelism.sequence_parallel=true", *PADDED),
    "fsdp2_tp2": ("parallelism=fsdp2_tp2", *PADDED),
}


class OfTRL:
    """Five steps of a RewardTrainer, each of all pairs, from the weights in ``folder``."""

    def __init__(self, root: Path, pad_token: str | None = None) -> None:
        self.folder, found = root / "classifier", []
        write_classifier(self.folder, pad_token)

        class Trainer(trl.RewardTrainer):  # type: ignore[misc, name-defined]
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(*args, **kwargs)
                metrics = {name: self._metrics["train"][name][-1] for name in METRICS[1:]}
                found.append({"loss": loss.item(), **metrics})
                return loss

        settings = OPTIONS | {"output_dir": str(root / "trl"), "per_device_train_batch_size": len(ROWS)}
        trainer = Trainer(
            model=AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=1),
            args=trl.RewardConfig(max_steps=STEPS, center_rewards_coefficient=CENTER, **settings),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=AutoTokenizer.from_pretrained(self.folder),
        )
        trainer.train()
        self.curves, self.scores = curves(found), scores(trainer.model)


def write_classifier(folder: Path, pad_token: str | None) -> None:
    model = tiny_model()
    model.config.num_labels = 1
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    tokenizer.save_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    classifier.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        torch.nn.init.normal_(classifier.score.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    classifier.save_pretrained(folder)


def curves(rows: list[dict[str, float]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in METRICS}


def scores(model: Any) -> Tensor:
    """Return the scores of both answers of every row, one at a time, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    answers = [row["prompt"] + row[side] for row in ROWS for side in ("chosen", "rejected")]
    ids = [tokenizer.apply_chat_template(answer, return_dict=True)["input_ids"] for answer in answers]
    with torch.no_grad():
        return torch.stack([model.eval()(torch.tensor([one])).logits[0, 0] for one in ids])


def run(root: Path, folder: Path, *more: str) -> Path:
    """Train on the rows, and return the run's folder."""
    data = root / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    here = (
        "stage=rm",
        f"stage.center_rewards_coefficient={CENTER}",
        "model=hf",
        f"model.path={folder}",
        "data=files",
        f"data.train={data}",
        f"data.cache_dir={root}/cache",
        "data.num_workers=1",
        "data.max_length=256",
        "run.name=rm",
        f"run.output_dir={root}/runs",
        f"run.max_steps={STEPS}",
        "run.dtype=fp32",
        "run.device=cpu",
        "optimizer=adamw",
        f"optimizer.lr={OPTIMIZER.lr}",
        f"optimizer.betas={list(OPTIMIZER.betas)}",
        f"optimizer.eps={OPTIMIZER.eps}",
        f"optimizer.weight_decay={OPTIMIZER.weight_decay}",
        f"optimizer.max_grad_norm={OPTIMIZER.max_grad_norm}",
        "scheduler=constant",
    )
    launch = check_launch(composed([*here, *more]), ConfigSources(), command=more)
    path = prepare(replace(launch, console=Console(quiet=True)))
    Ranks(launch.world_size, megatron=True).run(train, path, None)
    return path


def trained_rows(path: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{name: row[f"train/{name}"] for name in METRICS} for row in lines if "train/loss" in row]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> OfTRL:
    return OfTRL(tmp_path_factory.mktemp("oracle"))


def assert_same(found: Path, oracle: OfTRL) -> None:
    ours = curves(trained_rows(found))
    assert oracle.curves["loss"][-1] < 0.8 * oracle.curves["loss"][0], "nothing was learned"
    for name, expected in oracle.curves.items():
        assert curve_error(ours[name], expected) <= 1e-5, name
    exported = AutoModelForSequenceClassification.from_pretrained(found / "export")
    torch.testing.assert_close(scores(exported), oracle.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_five_steps_equal_trl(tmp_path: Path, oracle: OfTRL, name: str) -> None:
    assert_same(run(tmp_path, oracle.folder, *RUNS[name]), oracle)
