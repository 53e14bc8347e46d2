"""Skipped steps: losses that are not finite, and loss spikes."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, call_here, curve, newest, rows, run_here

BAD, COUNT = 17, 60
NAN = ("stage._target_=tests.e2e.losses.Marked", "+stage.factor=nan")
MENDED = ("stage._target_=tests.e2e.losses.Marked", "+stage.factor=1")
SPIKE = ("stage._target_=tests.e2e.losses.Marked", "+stage.factor=50")
GUARDED = (
    *SMALL,
    "run.export=false",
    "checkpoint.save_every=4",
    "checkpoint.keep_last=0",
    "data.packing=none",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Write chats whose 17th sample has the mark of tests.e2e.losses.Marked; they are not shuffled."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    chats = [
        {"instruction": f"Count {n}.", "output": "yes " * (50 if n == BAD else n % 9 + 1)}
        for n in range(1, COUNT)
    ]
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return "data=files", f"data.train={path}", "data.shuffle=false"


def warnings(run: Path) -> list[str]:
    return [line for line in (run / "train.log").read_text().splitlines() if "skipped; samples" in line]


@pytest.mark.parametrize(("how", "why"), [(NAN, "loss is nan"), (SPIKE, "(run.loss_spike_factor)")])
def test_a_step_is_skipped_and_its_samples_are_named(
    data: tuple[str, ...], tmp_path: Path, how: tuple[str, ...], why: str
) -> None:
    """The 17th sample is in the fifth batch of the first epoch and in step 20."""
    guarded = (*GUARDED, *data, *how, "run.loss_spike_factor=3", "run.max_steps=20", "scheduler=constant")
    run = run_here(tmp_path, *guarded)
    skipped = [row["train/total_skipped"] for row in rows(run, "train/loss")]
    # A spike is found only after ten earlier steps; a loss that is not finite is always found.
    assert skipped == [0] * 4 + [int(how is NAN)] * 15 + [1 + (how is NAN)]
    assert why in warnings(run)[-1]
    assert "samples data.train:17, data.train:18, data.train:19, data.train:20" in warnings(run)[-1]
    rest = run_here(tmp_path / "rest", *guarded, f"checkpoint.resume={run}/checkpoints/step_00000012")
    assert curve(rest) == curve(run)[12:]


def test_a_run_that_was_stopped_goes_on_from_its_last_checkpoint(
    data: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounded = (*GUARDED, *data, "run.max_consecutive_skips=1", "run.max_steps=6")
    assert call_here(f"run.output_dir={tmp_path}", *bounded, *NAN) == 1
    assert "run.max_consecutive_skips" in capsys.readouterr().err
    stopped = newest(tmp_path)
    assert len(warnings(stopped)) == 1
    rest = run_here(tmp_path / "rest", *bounded, *MENDED, f"checkpoint.resume={stopped}")
    straight = run_here(tmp_path / "straight", *bounded, *MENDED)
    assert curve(rest) == curve(straight)[4:]
