"""``stage=rm`` from the command line to exports, evaluations and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from components.contracts.errors import ConfigError
from runner.commands.evaluate import evaluation
from runner.commands.export import export
from runner.commands.trained_model import open_model
from tests.e2e.commands import EXPORTING, rows, run_here

RM = (*EXPORTING, "stage=rm", "run.final_sample_tokens=0", "optimizer.lr=1e-3", "checkpoint.save_every=2")
REWARDS = ("loss", "accuracy", "margin", "mean_reward", "rewards/chosen", "rewards/rejected")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("run"), *RM, "checkpoint.keep_last=0")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(
        tmp_path_factory.mktemp("adapted"), *RM, "adapter=lora", "adapter.r=4", "optimizer.lr=1e-2"
    )


def scores(model: Any) -> Tensor:
    """Return the scores of two padded sequences."""
    pad = model.config.pad_token_id
    assert pad is not None
    ids = torch.tensor([[7, 8, 9, 10], [7, 8, pad, pad]])
    with torch.no_grad():
        found: Tensor = model.eval()(ids, attention_mask=(ids != pad).long()).logits
    assert found.shape == (2, 1)
    return found


def evaluated(folder: Path, *more: str) -> dict[str, float]:
    """Return the last metrics of ``python -m runner.evaluate``."""
    return metrics(run_here(folder, *evaluation([*more, f"run.output_dir={folder}"])))


def metrics(folder: Path, split: str = "eval") -> dict[str, float]:
    last = rows(folder, f"{split}/loss")[-1]
    return {name: last[f"{split}/{name}"] for name in REWARDS}


def test_a_run_reports_rewards(run: Path) -> None:
    for split in ("train", "eval"):
        last = metrics(run, split)
        assert last["margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])


def test_the_run_is_evaluated_and_so_is_its_export(tmp_path: Path, run: Path) -> None:
    own = metrics(run)
    assert evaluated(tmp_path / "run", f"checkpoint={run}") == own
    options = ("stage=rm", "data=demo", "data.max_length=128")
    exported = evaluated(tmp_path / "export", f"checkpoint={run / 'export'}", *options)
    assert exported == pytest.approx(own, rel=1e-5)


def test_a_checkpoint_is_exported_as_by_the_run(tmp_path: Path, run: Path) -> None:
    export([f"checkpoint={run}", f"output={tmp_path / 'out'}"])
    for path in (run / "export").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_engine_goes_on(tmp_path: Path, run: Path) -> None:
    point = run / "checkpoints" / "step_00000002"
    rest = run_here(tmp_path, *RM, "parallelism=tp2pp2", f"checkpoint.resume={point}")
    ours, theirs = (rows(folder, "train/loss") for folder in (rest, run))
    assert [row["step"] for row in ours] == [3, 4]
    losses = [row["train/loss"] for row in theirs[2:]]
    assert [row["train/loss"] for row in ours] == pytest.approx(losses, rel=1e-5)


def test_an_adapter_has_the_whole_head(tmp_path: Path, adapted: Path) -> None:
    config = json.loads((adapted / "export" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model = AutoPeftModelForSequenceClassification.from_pretrained(adapted / "export", num_labels=1)
    base = AutoModelForSequenceClassification.from_pretrained(adapted / "base")
    own = model.base_model.model.score.modules_to_save["default"].weight
    assert not torch.equal(own, base.score.weight), "the head is trained"
    export([f"adapter={adapted / 'export'}", "merge=true", f"output={tmp_path / 'merged'}"])
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores(merged), scores(model), rtol=1e-5, atol=1e-5)
    export([f"checkpoint={adapted}", "merge=true", f"output={tmp_path / 'ours'}"])
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "merged" / "model.safetensors").read_bytes()


def test_the_adapter_is_evaluated(tmp_path: Path, adapted: Path) -> None:
    options = ("stage=rm", "data=demo", "data.max_length=128")
    found = evaluated(tmp_path, f"checkpoint={adapted / 'export'}", *options)
    assert found == pytest.approx(metrics(adapted), rel=1e-5)


def test_a_reward_model_writes_no_text(run: Path, adapted: Path) -> None:
    for folder in (run, run / "export", adapted, adapted / "export"):
        with pytest.raises(ConfigError, match="is a reward model, which gives scores instead of text"):
            open_model({"checkpoint": str(folder)})


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path, run: Path) -> None:
    """As in TRL. transformers could otherwise not score a padded batch."""
    folder = shutil.copytree(run / "export", tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = json.loads((folder / "config.json").read_text()) | {"pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(shape))
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    again = run_here(tmp_path, *RM[6:], "model=hf", f"model.path={folder}", "run.max_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(again / "export")
    assert tokenizer.pad_token == tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(again / "export")
    assert model.config.pad_token_id == tokenizer.eos_token_id
    scores(model)
