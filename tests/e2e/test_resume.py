"""A resumed run has the same batches, the same moments and bitwise the same metrics."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, call_here, curve, run_here

TEN = (*SMALL, "run.max_steps=10", "scheduler=cosine", "scheduler.warmup_steps=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(
        tmp_path_factory.mktemp("straight"), *TEN, "checkpoint.save_every=5", "checkpoint.keep_last=0"
    )


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo"])
def test_five_and_five_is_ten(straight: Path, tmp_path: Path, stage: str) -> None:
    saves = ("checkpoint.save_every=5", "checkpoint.keep_last=0")
    ten = straight if stage == "sft" else run_here(tmp_path / "ten", *TEN, f"stage={stage}", *saves)
    half = ten / "checkpoints" / "step_00000005"
    rest = run_here(tmp_path / "rest", *TEN, f"stage={stage}", f"checkpoint.resume={half}")
    assert curve(rest) == curve(ten)[5:]


def test_a_run_folder_resumes_from_its_newest_checkpoint(straight: Path, tmp_path: Path) -> None:
    longer = run_here(tmp_path, *TEN, "run.max_steps=12", f"checkpoint.resume={straight}")
    assert [row["step"] for row in curve(longer) if "train/loss" in row] == [11, 12]
    assert json.loads((longer / "run.json").read_text())["resumed_from"].endswith("step_00000010")


def test_auto_starts_afresh_then_continues(tmp_path: Path) -> None:
    first = run_here(tmp_path, *TEN, "run.max_steps=3", "checkpoint.resume=auto")
    # A killed run leaves a row after its last checkpoint and half of another one.
    with (first / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/loss": 99.0}\n{"step": 5, "tra')
    second = run_here(tmp_path, *TEN, "run.max_steps=5", "checkpoint.resume=auto")
    other = run_here(tmp_path, *TEN, "run.max_steps=2", "checkpoint.resume=auto", "run.name=other")
    assert first == second
    assert [row["step"] for row in curve(second) if "train/loss" in row] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in curve(other) if "train/loss" in row] == [1, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.seed=1", ["run.seed"]),
        ("run.global_batch_size=8", ["run.global_batch_size"]),
        ("data.max_length=64", ["data"]),
        ("model.architecture.hidden_size=32", ["model"]),
        ("stage=pt", ["data"]),
        ("data.drop_last=true", ["data"]),
        ("run.max_steps=7", ["run.max_steps", "10 steps"]),
        ("optimizer=sgd", ["its optimizer was adamw", "config.yaml"]),
    ],
)
def test_what_must_not_change_is_refused(
    straight: Path, tmp_path: Path, change: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = call_here(f"run.output_dir={tmp_path}", *TEN, f"checkpoint.resume={straight}", change)
    message = capsys.readouterr().err
    assert code == 2, message
    for word in words:
        assert word in message


def test_weights_alone_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_here(tmp_path, *TEN, "checkpoint.model_only=true")
    assert call_here(f"run.output_dir={tmp_path}", *TEN, f"checkpoint.resume={run}") == 2
    assert "checkpoint.model_only" in capsys.readouterr().err
