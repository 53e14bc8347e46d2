"""``stage.reference=precomputed`` in whole runs."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from components.engines.fsdp2 import parallelize
from components.engines.fsdp2.log_prob_model import LogProbModel
from runner.records.run_record import RunRecord
from tests.e2e.commands import SMALL, curve, run_here

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """Return the options of runs on sixteen pairs, four of them for evaluation, with a separate cache."""
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for n in range(16):
            prompt, chosen, rejected = (" ".join(WORDS[n % k : n % k + k]) for k in (5, 3, 4))
            file.write(
                json.dumps({"prompt": f"{n}: {prompt}?", "chosen": chosen, "rejected": rejected}) + "\n"
            )
    return (
        *SMALL,
        "stage=dpo",
        "data=files",
        f"data.train={tmp_path}/pairs.jsonl",
        "data.strings=chat",
        "data.max_length=48",
        "data.eval_fraction=0.25",
        f"data.cache_dir={tmp_path}/cache",
        "optimizer.lr=1e-2",
        "run.global_batch_size=4",
        "run.micro_batch_size=2",
        "run.max_steps=null",
        "run.epochs=2",
        "run.eval_every=1",
        "run.export=false",
    )


PRECOMPUTED = "stage.reference=precomputed"


def close(run: Path, other: Path) -> None:
    """Assert that losses are equal up to rounding."""
    for ours, theirs in zip(curve(run), curve(other), strict=True):
        losses = {key: value for key, value in theirs.items() if key.endswith("/loss")}
        assert losses == pytest.approx({key: ours[key] for key in losses}, abs=1e-5)


@pytest.mark.parametrize("form", ["data.packing=none", "data.share_prompt=true"])
def test_losses_are_those_of_a_frozen_reference(
    tmp_path: Path, options: tuple[str, ...], form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    frozen = run_here(tmp_path / "frozen", *options, form)
    first = run_here(tmp_path / "first", *options, form, PRECOMPUTED)
    assert "reference: computed now" in capfd.readouterr().err
    second = run_here(tmp_path / "second", *options, form, PRECOMPUTED)
    assert "reference: read from" in capfd.readouterr().err
    per_epoch = len(curve(frozen)) // 2
    assert per_epoch >= 4
    assert curve(first) == curve(second)
    assert curve(first)[:per_epoch] == curve(frozen)[:per_epoch]
    close(first, frozen)
    assert not (first / "reference").exists()
    reference = RunRecord.read(first).reference
    assert reference is not None
    assert not reference.compute, "a restart of the run would compute it again"


def test_a_run_that_is_continued_finds_or_computes_the_same(
    tmp_path: Path, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """The reference is the model before the first step, also when the run resumes from a later one."""
    whole = run_here(
        tmp_path / "whole", *options, PRECOMPUTED, "checkpoint.save_every=2", "checkpoint.keep_last=0"
    )
    resume = f"checkpoint.resume={whole}/checkpoints/step_00000002"
    found = run_here(tmp_path / "found", *options, PRECOMPUTED, resume)
    assert curve(found) == curve(whole)[4:]
    shutil.rmtree(tmp_path / "cache" / "reference")
    capfd.readouterr()
    again = run_here(tmp_path / "again", *options, PRECOMPUTED, resume)
    assert "reference: computed now" in capfd.readouterr().err
    assert curve(again) == curve(whole)[4:]


def test_another_reference_is_computed_anew(
    tmp_path: Path, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Another seed or another ``stage.reference_path`` means another reference model."""
    one = (*options, "run.max_steps=1", "run.epochs=null", "run.eval_every=0")
    first = run_here(tmp_path / "first", *one, PRECOMPUTED, "run.export=true")
    other = (*one, f"stage.reference_path={first}/export")
    for change in ("run.seed=1", other[-1]):
        capfd.readouterr()
        cached = run_here(tmp_path / "cached", *one, PRECOMPUTED, change)
        assert "reference: computed now" in capfd.readouterr().err
    frozen = run_here(tmp_path / "frozen", *other, "stage.reference=frozen")
    assert curve(cached) == curve(frozen) != curve(first)
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 3


def test_an_adapter_is_compared_with_its_base(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Losses are equal with the adapter switched off, a frozen second model, and a precomputed reference."""
    adapter = (*options, "adapter=lora", "adapter.r=4", "run.epochs=1", "run.eval_every=0")
    off = run_here(tmp_path / "off", *adapter)
    losses = [row["train/loss"] for row in curve(off) if "train/loss" in row]
    assert losses[-1] != losses[0]
    for choice in ("frozen", "precomputed"):
        assert curve(run_here(tmp_path / choice, *adapter, f"stage.reference={choice}")) == curve(off)


def test_there_is_one_model_at_a_time(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    alive: WeakSet[LogProbModel] = WeakSet()

    class Counted(LogProbModel):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            gc.collect()
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(parallelize, "LogProbModel", Counted)
    one = (*options, "run.max_steps=1", "run.epochs=null", "run.eval_every=0")
    run_here(tmp_path / "frozen", *one, "stage.reference=frozen")
    assert counts == [1, 2]
    run_here(tmp_path / "precomputed", *one, PRECOMPUTED)
    assert counts[2:] == [1, 1]
