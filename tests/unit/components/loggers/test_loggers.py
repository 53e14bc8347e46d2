"""The output of every logger is read back with the tools of its users."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from components.contracts.errors import ConfigError
from components.loggers import (
    CompositeLogger,
    Console,
    Jsonl,
    Row,
    RunInfo,
    RunResult,
    Tensorboard,
    Wandb,
    terminal,
)
from components.loggers.jsonl import JsonlLogger
from components.loggers.wandb import run_id
from tests.trackers import events, scalars, tags, wandb_runs

TABLE = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d", "id": "2"}]
ROOT = Path(__file__).parents[4]
ROWS: list[dict[str, float | int | None]] = [
    {"step": 1, "train/loss": 2.5, "train/num_tokens": 512, "train/num_zeros_in_grad": None},
    {"step": 2, "train/loss": 2.25, "train/num_tokens": 480},
    {"step": 2, "eval/loss": 2.125},
]
CONFIG: dict[str, Any] = {"run": {"seed": 0}, "model": {"path": None}}
DONE = RunResult("completed", {"step": 2, "train/loss": 2.25, "eval/loss": 2.125})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "sft" / "stamp").mkdir(parents=True)
    return tmp_path / "sft" / "stamp"


def read_jsonl(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_on_disk_after_every_row(run_dir: Path) -> None:
    logger = Jsonl().open(RunInfo(run_dir, CONFIG))
    for number, row in enumerate(ROWS, start=1):
        logger.log(row)
        assert read_jsonl(run_dir) == ROWS[:number]
    logger.finish(DONE)
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_jsonl_keeps_the_key_of_a_number_json_cannot_write(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "new" / "m.jsonl")
    logger.log({"step": 3, "a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": None, "e": 0})
    logger.finish(DONE)
    text = (tmp_path / "new" / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 3,
        "a": None,
        "b": None,
        "c": None,
        "d": None,
        "e": 0,
    }


def test_jsonl_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        logger.log({"step": step})
        logger.finish(DONE)
    assert [row["step"] for row in read_jsonl(tmp_path)] == [1, 2]


class Breaks:
    """A logger that fails in the call named ``when``, with a message of two lines."""

    def __init__(self, when: str) -> None:
        self.when, self.calls = when, 0

    def check(self) -> None:
        """Accept, because no package is missing."""

    def open(self, start: RunInfo) -> "Breaks":  # noqa: ARG002
        return self.called("open")

    def log(self, row: Row) -> None:  # noqa: ARG002
        self.called("log")

    def finish(self, ending: RunResult) -> None:  # noqa: ARG002
        self.called("finish")

    def called(self, name: str) -> "Breaks":
        self.calls += 1
        if name == self.when:
            raise OSError("the server\n  is gone")
        return self


@pytest.mark.parametrize(("when", "calls"), [("open", 1), ("log", 2), ("finish", 5)])
def test_a_logger_that_fails_is_told_of_once_and_left_out(
    when: str, calls: int, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Breaks(when)
    with caplog.at_level(logging.WARNING, logger="components"):
        loggers = CompositeLogger({"broken": broken, "jsonl": Jsonl()}, RunInfo(run_dir, CONFIG))
        for row in ROWS:
            loggers.log(row)
        loggers.finish(DONE)
    assert [record.getMessage() for record in caplog.records] == [
        "logger=broken failed and is left out from here on: OSError: the server is gone"
    ]
    assert broken.calls == calls
    assert read_jsonl(run_dir) == ROWS


def test_a_terminal_is_quiet_where_no_console_was_chosen() -> None:
    assert terminal({"jsonl": Jsonl()}).quiet
    assert terminal({}).progress_bar() is None
    assert terminal({"console": Console(progress=False)}).progress_bar() is None
    shown = terminal({"jsonl": Jsonl(), "console": Console()})
    assert not shown.quiet
    assert shown.progress_bar() is not None


def test_tensorboard_reads_what_was_logged(run_dir: Path) -> None:
    Tensorboard().check()
    logger = Tensorboard().open(RunInfo(run_dir, CONFIG))
    for row in ROWS:
        logger.log(row)
    logger.log_table("samples", TABLE, 2)
    logger.finish(DONE)
    assert scalars(run_dir / "tensorboard") == {
        "train/loss": [(1, 2.5), (2, 2.25)],
        "train/num_tokens": [(1, 512.0), (2, 480.0)],
        "eval/loss": [(2, 2.125)],
        "final/train/loss": [(2, 2.25)],
        "final/eval/loss": [(2, 2.125)],
    }
    assert {"config/text_summary", "_hparams_/session_start_info"} <= tags(run_dir / "tensorboard")
    (shown,) = events(run_dir / "tensorboard").Tensors("samples/text_summary")
    expected = b"**prompt** a\n\n**completion** b\n\n---\n\n**prompt** c\n\n**completion** d\n\n**id** 2"
    assert (shown.step, list(shown.tensor_proto.string_val)) == (2, [expected])


def test_tensorboard_goes_on_after_the_checkpoint(run_dir: Path) -> None:
    """Steps 2 and 3 of a killed start are replaced, because the next start begins after step 1."""
    first = Tensorboard().open(RunInfo(run_dir, CONFIG))
    for step in (1, 2, 3):
        first.log({"step": step, "train/loss": 10.0 + step})
    first.finish(RunResult("failed", {"step": 3, "train/loss": 13.0}, "killed"))
    second = Tensorboard().open(RunInfo(run_dir, CONFIG, step=1))
    second.log({"step": 2, "train/loss": 2.0})
    second.finish(DONE)
    assert scalars(run_dir / "tensorboard")["train/loss"] == [(1, 11.0), (2, 2.0)]


def test_a_restart_from_the_beginning_replaces_the_first_evaluation(run_dir: Path) -> None:
    for loss in (10.0, 9.0):
        logger = Tensorboard().open(RunInfo(run_dir, CONFIG))
        logger.log({"step": 0, "eval/loss": loss})
        logger.finish(RunResult("failed", {}, "killed"))
    assert scalars(run_dir / "tensorboard")["eval/loss"] == [(0, 9.0)]
    with mock.patch("wandb.init") as init:
        run = init.return_value
        run.id, run.starting_step = "abc", 50
        Wandb().open(RunInfo(run_dir, CONFIG)).log({"step": 0, "eval/loss": 9.0})
    assert not run.log.called, "the server has the evaluation of step 0"


def test_a_new_run_logs_every_step(run_dir: Path) -> None:
    with mock.patch("wandb.init") as init:
        run = init.return_value
        run.id, run.starting_step = "abc", 0
        logger = Wandb().open(RunInfo(run_dir, CONFIG))
    for step in (0, 1):
        logger.log({"step": step, "eval/loss": 2.0})
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 1]


def test_an_owed_evaluation_reaches_the_server(run_dir: Path) -> None:
    """A run that resumes at step 4 evaluates there; the server has its training row already."""
    with mock.patch("wandb.init") as init:
        run = init.return_value
        run.id, run.starting_step = "abc", 5
        logger = Wandb().open(RunInfo(run_dir, CONFIG, step=4))
    logger.log({"step": 4, "eval/loss": 2.0})
    logger.log({"step": 3, "train/loss": 3.0})
    logger.log_table("samples", TABLE, 4)
    logger.log({"step": 5, "train/loss": 1.0})
    logged = [(list(call.args[0]), call.kwargs["step"]) for call in run.log.call_args_list]
    assert logged == [(["eval/loss"], 5), (["samples"], 5), (["train/loss"], 5)]


WANDB_RUN = """
import json, sys
from pathlib import Path
from components.loggers import CompositeLogger, RunInfo, RunResult, Wandb
wandb = Wandb(project="tests", mode="offline", tags=("a",))
wandb.check()
folder, (rows, config, table) = Path(sys.argv[1]), json.loads(sys.argv[2])
(folder / "audit.json").write_text("{}")
(folder / "code.diff").write_text("+ a line")
facts = {"sweep": {"folder": "/outputs/sweeps/lr", "number": 7}, "git_commit": "abc"}
for step, ending in ((0, "failed"), (1, "interrupted"), (1, "completed")):
    logger = CompositeLogger({"wandb": wandb}, RunInfo(folder, config, facts, step))
    for row in rows:
        if row["step"] > step:
            logger.log(row)
    logger.log_table("samples", table, 2)
    logger.finish(RunResult(ending, {"step": 2, "eval/loss": 2.125}, f"because {ending}"))
"""


@pytest.fixture(scope="module")
def wandb_files(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the files of three starts of one run: one failed, one was stopped, one was completed."""
    pytest.importorskip("wandb")
    run_dir = tmp_path_factory.mktemp("sft") / "stamp"
    run_dir.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(run_dir.parent), "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(run_dir), json.dumps([ROWS, CONFIG, TABLE])],
        check=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    return wandb_runs(run_dir)


def test_wandb_offline_reads_what_was_logged(wandb_files: list[Any]) -> None:
    run = wandb_files[0]
    table = {key: run.history[2].pop(key) for key in list(run.history[2]) if key.startswith("samples/")}
    assert (table["samples/ncols"], table["samples/nrows"]) == (3, 2)
    written = json.loads((run.path.parent / "files" / table["samples/path"]).read_text())
    assert written == {"columns": ["prompt", "completion", "id"], "data": [["a", "b", None], ["c", "d", "2"]]}
    assert run.history == {
        1: {"train/loss": 2.5, "train/num_tokens": 512},
        2: {"train/loss": 2.25, "train/num_tokens": 480, "eval/loss": 2.125},
    }
    assert (run.start.project, run.start.display_name) == ("tests", f"{run.path.parents[3].name}/stamp")
    assert (run.start.run_group, list(run.start.tags)) == ("lr", ["a", "sweep", "job 7"])
    assert run.config.items() >= CONFIG.items()
    assert run.config["code"]["git_commit"] == "abc"
    assert run.artifact_files == {"audit.json", "code.diff", "samples.table.json"}


def test_wandb_is_told_how_a_run_ends(wandb_files: list[Any]) -> None:
    failed, _, done = wandb_files
    assert [run.exit_code for run in wandb_files] == [1, 1, 0]
    assert [run.summary["status"] for run in wandb_files] == ["failed", "interrupted", "completed"]
    assert [run.preempting for run in wandb_files] == [False, True, False]
    assert failed.summary["reason"] == "because failed"
    assert done.summary["eval/loss"] == 2.125


def test_wandb_goes_on_with_the_same_run(wandb_files: list[Any]) -> None:
    assert len({run.start.run_id for run in wandb_files}) == 1
    assert [min(run.history) for run in wandb_files] == [1, 2, 2]


def test_a_wandb_id_is_kept_in_the_run_folder(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != first


def test_wandb_online_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"logger.wandb.mode: is online, .*KEY.*logger.wandb.mode=offline"):
        Wandb().check()
    Wandb(mode="offline").check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.loggers.base.find_spec", lambda _: None)
    for description, package in ((Tensorboard(), "tensorboard"), (Wandb(), "wandb")):
        with pytest.raises(ConfigError, match=f"logger={package}: .*pip install {package}"):
            description.check()
    Jsonl().check()


def test_refuses_impossible_values() -> None:
    with pytest.raises(ConfigError, match=r"logger.tensorboard.flush_secs"):
        Tensorboard(flush_secs=0)


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    heavy = "('torch', 'wandb', 'tensorboard')"
    code = f"import sys, components.loggers; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
