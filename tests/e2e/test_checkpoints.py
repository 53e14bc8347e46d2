"""Best checkpoints, early stopping, damaged checkpoints, and checkpoints written in the background."""

import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import SMALL, call_here, curve, run_here

QUICK = (
    *SMALL,
    "run.max_steps=8",
    "run.micro_batch_size=4",
    "run.eval_every=1",
    "scheduler=constant",
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write 36 chats for training and four for evaluation, and return the options of a run on them."""
    folder = tmp_path_factory.mktemp("few")
    chats = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n + 1)))} for n in range(40)]
    for name, some in {"train": chats[:36], "eval": chats[36:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in some))
    files = [f"data.{name}={folder}/{name}.jsonl" for name in ("train", "eval")]
    return [*QUICK, "data=files", "data.packing=none", *files]


def saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def stderr_of(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_an_early_stop_keeps_the_best_and_is_not_resumed(
    tmp_path: Path, few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The mode is max, so that the first evaluation has the best loss, which then falls."""
    watched = (
        "checkpoint.keep_best=eval/loss",
        "early_stopping.metric=eval/loss",
        "checkpoint.keep_best_mode=max",
        "checkpoint.keep_last=1",
    )
    first = run_here(tmp_path, *few, *watched, "early_stopping.patience=2", "checkpoint.async_save=true")
    told = capsys.readouterr()
    assert "stopped early at step 3: eval/loss has not improved since step 1" in " ".join(told.err.split())
    assert f"best        {first}/checkpoints/step_00000001 by eval/loss" in told.out
    assert saved(first) == [1, 3]
    again = (f"run.output_dir={tmp_path}", *few, *watched, "checkpoint.resume=auto")
    assert call_here(*again, "early_stopping.patience=2") == 2
    assert "has not improved for 2 evaluations already; set early_stopping.patience above 2" in stderr_of(
        capsys
    )
    assert call_here(*again, "early_stopping.patience=4") == 0
    assert saved(first) == [1, 5], "the count went on"
    capsys.readouterr()
    elsewhere = ("run.max_steps=6", "run.name=elsewhere", f"checkpoint.resume={first}")
    run_here(tmp_path, *few, *watched, "early_stopping.patience=9", *elsewhere)
    assert f"the best eval/loss so far is that of step 1 in {first}/checkpoints" in stderr_of(capsys)


def test_a_run_that_continues_keeps_its_start_and_its_end(
    tmp_path: Path, few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It names no export of an earlier end, and an evaluation of it has a folder of its own."""
    once = (*few, "run.name=a", "run.max_steps=2", "run.final_sample_tokens=0")
    base = run_here(tmp_path, *few, "run.name=base", "run.max_steps=1")
    run = run_here(tmp_path, *once, "run.export=true", f"checkpoint.init_from={base.parent}")
    assert "export      " in capsys.readouterr().out
    run_here(tmp_path, *few, "run.name=base", "run.max_steps=1")
    (run / "run.json").write_text(
        json.dumps(json.loads((run / "run.json").read_text()) | {"results": {"first": {}, "last": {}}})
    )
    again = (*once, "checkpoint.resume=auto")
    longer = run_here(tmp_path, *again, "run.max_steps=3", f"checkpoint.init_from={base}")
    assert longer == run
    assert "export      " not in capsys.readouterr().out
    recorded = yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["init_from"]
    assert recorded == str(base / "checkpoints" / "step_00000001")
    results = json.loads((run / "run.json").read_text())["results"]
    assert (results["first"]["step"], results["last"]["step"]) == (1, 3)
    before = (run / "config.yaml").read_text()
    evaluated = run_here(tmp_path, *again, "run.evaluate_only=true")
    assert evaluated != run
    assert (run / "config.yaml").read_text() == before


def test_a_damaged_checkpoint_is_refused_and_data_may_be_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        *QUICK,
        "run.eval_every=0",
        "checkpoint.save_every=2",
        "checkpoint.async_save=true",
        "checkpoint.keep_last=0",
    )
    ten = run_here(tmp_path / "ten", *options)
    half = ten / "checkpoints" / "step_00000004"
    rest = run_here(tmp_path / "rest", *options, f"checkpoint.resume={half}", "checkpoint.verify=true")
    assert curve(rest) == curve(ten)[4:]
    forced = run_here(
        tmp_path / "forced",
        *options,
        f"checkpoint.resume={half}",
        "run.seed=1",
        "checkpoint.allow_mismatch=true",
    )
    assert "checkpoint.allow_mismatch: seed of" in stderr_of(capsys)
    assert [row["step"] for row in curve(forced)] == [row["step"] for row in curve(rest)]
    assert curve(forced) != curve(rest)
    data = ten / "checkpoints" / "step_00000008" / "__0_0.distcp"
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    assert (
        call_here(
            f"run.output_dir={tmp_path}", *options, f"checkpoint.resume={ten}", "checkpoint.verify=true"
        )
        == 2
    )
    message = stderr_of(capsys)
    assert "__0_0.distcp is damaged" in message
    assert f"take checkpoint.resume={ten}/checkpoints/step_00000006" in message
