"""When a run logs, evaluates, saves and ends; and the ``debug`` group."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import EXPORTING, SMALL, call_here, curve, newest, rows, run_here

SIX = (*SMALL, "run.max_steps=6", "checkpoint.keep_last=0")


@pytest.fixture(scope="module")
def every_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("run"), *SIX, "run.eval_every=1")


def test_shares_of_the_run_and_an_evaluation_before_it(tmp_path: Path, every_step: Path) -> None:
    run = run_here(
        tmp_path, *SIX, "run.eval_every=0.3", "run.eval_on_start=true", "checkpoint.save_every=0.5"
    )
    evaluated = {row["step"]: row["eval/loss"] for row in rows(run, "eval/loss")}
    assert list(evaluated) == [0, 2, 4, 6]
    own = {row["step"]: row["eval/loss"] for row in rows(every_step, "eval/loss")}
    assert {step: own[step] for step in (2, 4, 6)} == {step: evaluated[step] for step in (2, 4, 6)}
    assert evaluated[0] > own[1]
    assert [path.name[-1] for path in sorted((run / "checkpoints").iterdir())] == ["3", "6"]


def test_no_evaluation_at_the_end(tmp_path: Path) -> None:
    run = run_here(tmp_path, *SIX, "run.max_steps=2", "run.eval_on_start=true", "run.eval_at_end=false")
    assert [row["step"] for row in rows(run, "eval/loss")] == [0]


def test_a_logged_loss_is_the_mean_since_the_last_row(tmp_path: Path, every_step: Path) -> None:
    losses = [row["train/loss"] for row in rows(every_step, "train/loss")]
    options = ("run.log_every=3", "checkpoint.save_every=2", f"run.output_dir={tmp_path}")
    run = run_here(tmp_path, *SIX, *options)
    means = [row["train/loss"] for row in rows(run, "train/loss")]
    assert means == [pytest.approx(sum(losses[:3]) / 3, abs=0), pytest.approx(sum(losses[3:]) / 3, abs=0)]
    last = rows(run_here(tmp_path / "last", *SIX, "run.log_every=4"), "train/loss")[-1]
    assert (last["step"], last["train/loss"]) == (6, pytest.approx(sum(losses[4:]) / 2, abs=0))
    shares = rows(run_here(tmp_path / "share", *SIX, "run.log_every=0.5"), "train/loss")
    assert [row["train/loss"] for row in shares] == means
    # A run that resumes between two rows writes the same row.
    assert call_here(*SIX, *options, f"checkpoint.resume={run}/checkpoints/step_00000004") == 0
    assert curve(newest(tmp_path)) == [row for row in curve(run) if row["step"] == 6]


def test_a_part_of_an_epoch(tmp_path: Path, every_step: Path) -> None:
    first = rows(every_step, "train/epoch")[0]["train/epoch"]
    length = ("run.max_steps=null", f"run.epochs={2.5 * first}")
    run = run_here(tmp_path, *SMALL, *length, "checkpoint.save_every=2")
    assert [row["step"] for row in rows(run, "train/loss")] == [1, 2, 3]
    again = (f"run.output_dir={tmp_path}/again", f"checkpoint.resume={run}/checkpoints/step_00000002")
    assert call_here(*SMALL, *length, *again) == 0
    assert curve(newest(tmp_path / "again")) == [row for row in curve(run) if row["step"] == 3]


def test_named_evaluation_sets(tmp_path: Path) -> None:
    """Each set has its own metrics, and ``eval/loss`` is their mean."""
    sets = {"short": "a b c", "long": "a b c d e f " * 9}
    for name, text in sets.items():
        record = {"prompt": name, "completion": text}
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for _ in range(3)))
    named = ", ".join(f"{name}: {tmp_path / name}.jsonl" for name in sets)
    files = ("data=files", f"data.train={tmp_path}/short.jsonl", f"data.eval={{{named}}}")
    best = ("checkpoint.keep_best=eval/long/loss", "run.eval_every=1", "run.max_steps=2")
    run = run_here(tmp_path, *SMALL, *files, *best)
    for row in rows(run, "eval/loss"):
        assert row["eval/short/loss"] != row["eval/long/loss"]
        assert row["eval/loss"] == (row["eval/short/loss"] + row["eval/long/loss"]) / 2
    [last] = (run / "checkpoints").glob("*2/meta.json")
    assert json.loads(last.read_text())["state"]["best"] == min(
        row["eval/long/loss"] for row in rows(run, "eval/loss")
    )


def test_debug_fast(tmp_path: Path) -> None:
    words = [word for word in SMALL if word != "run.export=false"]  # the option of debug says it
    run = run_here(tmp_path, *words, "run.max_steps=100", "debug=fast", "run.max_steps=2")
    assert [row["step"] for row in rows(run, "train/loss")] == [1, 2]
    assert not (run / "export").exists()


def test_debug_overfit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*SMALL, "debug=overfit", "optimizer.lr=1e-2", f"run.output_dir={tmp_path}")
    assert call_here(*options, "run.max_steps=120") == 0
    assert rows(newest(tmp_path), "train/loss")[-1]["train/loss"] < 0.1
    assert rows(newest(tmp_path), "train/epoch")[-1]["train/epoch"] == 120  # a step is an epoch: one batch
    capsys.readouterr()
    assert call_here(*options, "run.max_steps=3") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "(running mean) after step 3, above run.target_loss=0.1; raise optimizer.lr" in said


def test_debug_limit(tmp_path: Path) -> None:
    """Every part of a run takes its turn, in 20 steps."""
    run = run_here(
        tmp_path, *(word for word in EXPORTING if not word.startswith("run.max_steps")), "debug=limit"
    )
    assert [row["step"] for row in rows(run, "train/loss")] == list(range(1, 21))
    assert len(rows(run, "eval/loss")) > 1
    assert list((run / "checkpoints").glob("*/meta.json"))
    assert (run / "export" / "config.json").is_file()
