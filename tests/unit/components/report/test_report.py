"""The report page: the files it reads, the data it keeps, and its notes about missing files."""

import base64
import json
import math
import sys
import time
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.report import make_sweep
from components.contracts.errors import DONE, INTERRUPTED, ConfigError
from components.contracts.status import JobStatus
from components.report import Entry, write_page
from components.report.curves import read_curves, thin
from components.report.page import varied_keys
from components.report.runs import read_completions
from runner.cli import run_or_answer
from runner.commands.report import WATCH_S, all_entries, arguments_of, entries, parse, report
from runner.records.job_record import JobRecord, SweepJob
from runner.records.run_summary import Results

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!-- {{script}} & 'quotes' \""


def write_rows(path: Path, *rows: dict[str, Any], end: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def floats(text: str) -> list[float]:
    return np.frombuffer(base64.b64decode(text), "<f4").tolist()


class Page(HTMLParser):
    """The elements of a page and its embedded data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []
        self.text = path.read_text()
        self.feed(self.text)
        start = self.text.index('type="application/json">') + len('type="application/json">')
        self.data: dict[str, Any] = json.loads(self.text[start : self.text.index("</script>", start)])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


# ---- curves


def test_curves_are_the_numbers_that_were_logged(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/loss": 9, "train/lr": 0.1},
        {"step": 2, "train/loss": None, "train/lr": 1e-05},
        {"step": 2, "eval/loss": 8.5},
        {"step": 3, "train/loss": 7.25, "note": "a text"},
    ]
    found = read_curves(write_rows(tmp_path / "m.jsonl", *rows, end='{"step": 4, "train/lo'), 9)
    points = {
        key: list(zip(one.steps.tolist(), one.means.tolist(), strict=True)) for key, one in found.items()
    }
    assert points == {
        "train/loss": [(1, 9), (3, 7.25)],
        "train/lr": [(1, 0.1), (2, 1e-05)],
        "eval/loss": [(2, 8.5)],
    }


def test_names_of_older_runs_are_those_of_today(tmp_path: Path) -> None:
    old = ("train/skipped", "train/main_loss", "eval/rewards_chosen", "eval/accuracy", "train/mtp_2")
    new = (
        "train/total_skipped",
        "train/lm_loss",
        "eval/rewards/chosen",
        "eval/rewards/accuracies",
        "train/mtp_2_loss",
    )
    rows = [{"step": 1} | dict.fromkeys(names, 1.0) for names in (old, new)]
    first, second = (read_curves(write_rows(tmp_path / "m.jsonl", row), 9) for row in rows)
    assert first.keys() == second.keys() == {*new}
    of_rewards = {"step": 1, "eval/rewards/chosen": 1.0, "eval/accuracy": 1.0}
    assert "eval/accuracy" in read_curves(write_rows(tmp_path / "m.jsonl", of_rewards), 9)


def test_statuses_of_older_runs_are_those_of_today(tmp_path: Path) -> None:
    (run,) = write_page("t", [Entry(0, tmp_path, status="stopped")], tmp_path / "page.html")
    assert run.status == "interrupted"


def test_rows_in_the_wrong_order_are_put_in_order(tmp_path: Path) -> None:
    rows = ({"step": step, "x": 10 * step} for step in (3, 1, 2))
    assert read_curves(write_rows(tmp_path / "m.jsonl", *rows), 9)["x"].means.tolist() == [10, 20, 30]


@pytest.mark.parametrize("text", ["", "\n", '{"st'])
def test_nothing_but_half_a_line_has_no_curves(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    assert read_curves(tmp_path / "m.jsonl", 9) == {}


@pytest.mark.parametrize("length", [1, 10, 11, 12, 997, 10_000])
def test_buckets_keep_extremes_and_the_mean(length: int) -> None:
    values = np.random.default_rng(length).standard_normal(length)
    values[length // 2], values[length // 3] = 50, -50
    shown = thin(np.arange(length) + 1.0, values, 11).to_json()
    means = floats(shown["means"])
    assert len(means) == len(floats(shown["steps"])) <= 11
    if length <= 11:
        assert means == values.astype(np.float32).tolist()
        assert "low" not in shown
        return
    width = -(-length // 11)
    pieces = [values[at : at + width] for at in range(0, length, width)]
    assert means == pytest.approx([piece.mean() for piece in pieces], rel=1e-6)
    assert floats(shown["high"]) == [np.float32(piece.max()) for piece in pieces]
    assert floats(shown["low"]) == [np.float32(piece.min()) for piece in pieces]
    assert (max(floats(shown["high"])), min(floats(shown["low"]))) == (50, -50)


# ---- pages


def finished(folder: Path, *, lr: float, loss: str = "NextToken", **facts: Any) -> Path:
    """Write a run folder as the runner leaves it, and return it."""
    rows = [
        {"step": step, "train/loss": 9 - step * lr, "perf/tokens_per_s": 100.0, "perf/mfu": 0.25}
        | {"train/total_tokens": 50 * step, "perf/step_ms": 500.0}
        for step in (1, 2, 3)
    ]
    write_rows(folder / "metrics.jsonl", *rows, {"step": 3, "eval/loss": 5 - lr})
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "optimizer": {"lr": lr, "betas": [0.9]},
                "run": {"name": "tuned", "seed": 0, "limit": float("inf")},
                "stage": {"_target_": f"components.losses.{loss}"},
            }
        )
    )
    source = {"name": "stdlib", "samples": 7, "stop_token_trained": None}
    held_out = {"name": "held out", "samples": 2, "supervised": 20}
    audit = {"train": {"sources": [source], "rows": 3}, "eval": {"sources": [held_out]}}
    (folder / "audit.json").write_text(json.dumps(audit))
    (folder / "samples.json").write_text(json.dumps([[["What is it?", False], [f"A {HOSTILE}", True]]]))
    (folder / "completions").mkdir()
    for step in (2, 3):
        row = {"prompt": "Say it", "completion": f"{HOSTILE} at {step}", "id": step}
        write_rows(folder / "completions" / f"step_{step:08}.jsonl", row)
    (folder / "run.json").write_text(
        json.dumps({"overrides": [f"optimizer.lr={lr}"], "ended": "completed"} | facts)
    )
    return folder


def a_sweep(folder: Path) -> Path:
    """Write a sweep of two completed runs, a refused one, a failed one, and one with few files."""
    sweep = folder / "sweeps" / "stamp"
    (sweep / "jobs").mkdir(parents=True)

    def job(number: int, status: str, run: Path | None, **known: Any) -> None:
        overrides = [f"optimizer.lr={number}", "run.seed=0"]
        record = {"number": number, "overrides": overrides, "status": status}
        record["folder"] = None if run is None else str(run)
        (sweep / "jobs" / f"{number}.json").write_text(json.dumps(record | known))

    job(0, "completed", finished(folder / "sft" / "a", lr=0.5), loss=4.5, seconds=3)
    job(1, "completed", finished(folder / "sft" / "b", lr=1.0), loss=4.0, seconds=4)
    (folder / "sft" / "b" / "preflight.json").write_text(
        '{"memory": [{"part": "weights", "GiB": 1.5}], "x": {"y": NaN}}'
    )
    job(2, "invalid", None, error=f"optimizer.lr: is 2\n{HOSTILE}")
    broken = finished(folder / "sft" / "d", lr=3.0)
    (broken / "logs").mkdir()
    (broken / "logs" / "rank_1.log").write_text("line\n" * 99 + f"\x1b[31mthe last {HOSTILE}\x1b[0m\n")
    (broken / "logs" / "error_1.json").write_text(
        json.dumps({"text": " failed:\nTraceback\nValueError: 4711\n"})
    )
    (broken / "logs" / "error_2.json").write_text('{"text": null}')
    (broken / "audit.json").write_text('{"train": ')
    job(3, "failed", broken, error="TrainingError: rank 1")
    (folder / "sft" / "e").mkdir()
    job(4, "running", folder / "sft" / "e")
    return sweep


def test_a_page_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = a_sweep(tmp_path)
    report([str(sweep)])
    assert "5 run(s): 2 completed, 1 invalid, 1 failed, 1 unfinished" in capsys.readouterr().out
    data = Page(sweep / "report.html").data
    assert data["columns"] == ["optimizer.lr"]
    assert [run["loss"] for run in data["runs"]] == [4.5, 4.0, None, 2.0, None]
    assert [chart["key"] for chart in data["charts"]] == ["train/loss", "eval/loss", "perf/tokens_per_s"]
    assert [curve["run"] for curve in data["charts"][0]["curves"]] == [0, 1, 3]
    assert floats(data["charts"][0]["curves"][1]["means"]) == [8, 7, 6]
    assert data["common"] == {
        "optimizer.betas": [0.9],
        "run.limit": "Infinity",
        "run.name": "tuned",
        "run.seed": 0,
        "stage._target_": "components.losses.NextToken",
    }
    assert [run["config"] for run in data["runs"]] == [{"optimizer.lr": lr} for lr in (0.5, 1.0)] + [{}] + [
        {"optimizer.lr": 3.0},
        {},
    ]


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    runs = write_page("t", entries(a_sweep(tmp_path)), tmp_path / "page.html")
    assert runs[1].missing == []
    assert runs[0].missing == ["no preflight.json"]
    assert any(words.startswith("audit.json cannot be read") for words in runs[3].missing)
    assert "no metrics.jsonl" in runs[4].missing
    assert runs[2].missing == []  # a refused job has no run folder


def test_a_failure_comes_with_the_last_lines_of_every_rank(tmp_path: Path) -> None:
    logs = write_page("t", entries(a_sweep(tmp_path)), tmp_path / "page.html")[3].logs
    assert "error_2.json" not in logs
    assert logs["error_1.json"].splitlines() == ["failed:", "Traceback", "ValueError: 4711"]
    assert logs["rank_1.log"].splitlines()[0] == "line"
    assert "\x1b" not in logs["rank_1.log"]
    assert "the last" in logs["rank_1.log"]


def test_tables_that_runs_share_are_there_once(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    report([str(sweep)])
    data = Page(sweep / "report.html").data
    assert data["runs"][0]["audit"] == data["runs"][1]["audit"] == 0
    assert data["runs"][0]["samples"] == data["runs"][1]["samples"] == 1
    assert len(data["documents"]) == 3
    assert data["documents"][0]["data"][0] == {"": "samples", "train: stdlib": 7, "eval: held out": 2}
    assert data["documents"][data["runs"][1]["preflight"]] == {
        "memory": [{"part": "weights", "GiB": 1.5}],
        "x": {"y": "NaN"},
    }


def test_no_text_of_a_run_becomes_an_element(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    report([str(sweep)])
    page = Page(sweep / "report.html")
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert HOSTILE in page.data["runs"][2]["error"]
    assert "The MIT License" in page.text  # the licence of uPlot, which the page contains
    assert page.links == []


def test_a_run_and_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "pt" / "2026-01-02", lr=1.0)
    finished(tmp_path / "sft" / "2026-01-03", lr=1.0)
    finished(tmp_path / "sft" / "2026-01-01", lr=2.0)
    report([str(tmp_path / "sft" / "2026-01-01"), f"output={tmp_path}/one.html"])
    one = Page(tmp_path / "one.html").data
    assert (one["title"], len(one["runs"]), one["runs"][0]["status"]) == ("sft / 2026-01-01", 1, "completed")
    assert one["common"]["optimizer.lr"] == 2.0
    assert one["runs"][0]["command"] == "python -m runner optimizer.lr=2.0"
    stamps = [entry.folder.name for entry in entries(tmp_path) if entry.folder]
    assert stamps == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert len(entries(tmp_path / "sft")) == 2


@pytest.mark.parametrize(
    ("job", "status"), [(None, "forecast"), ("completed", "forecast"), ("invalid", "invalid")]
)
def test_a_rehearsal_is_shown(tmp_path: Path, job: JobStatus | None, status: str) -> None:
    (tmp_path / "preflight.json").write_text(json.dumps({"waits": [{"line": "engine.py:7", "count": 3}]}))
    (tmp_path / "config.yaml").write_text("run: {dtype: bf16}")
    if job is not None:
        SweepJob(tmp_path / "s", 0, ()).write(JobRecord(0, (), job, str(tmp_path)))
    shown = entries(tmp_path if job is None else tmp_path / "s")
    (found,) = write_page("t", shown, tmp_path / "page.html")
    assert (found.missing, found.config, found.status) == ([], {"run.dtype": "bf16"}, status)
    assert "engine.py:7" in (tmp_path / "page.html").read_text()


def test_runs_have_their_names(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    report([str(sweep)])
    names = [run["name"] for run in Page(sweep / "report.html").data["runs"]]
    assert names == ["tuned · lr=0", "tuned · lr=1", "run 2 · lr=2", "tuned · lr=3", "run 4 · lr=4"]


def test_equal_names_get_numbers_and_a_renamed_run_is_not_named_twice(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "b")):
        run = finished(tmp_path / name / f"2026-01-0{number}", lr=1.0, overrides=[f"run.name={name}"])
        (run / "config.yaml").write_text(yaml.safe_dump({"run": {"name": name}}))
    report([str(tmp_path)])
    data = Page(tmp_path / "report.html").data
    assert [run["name"] for run in data["runs"]] == ["a", "b · 1", "b · 2"]
    assert data["columns"] == []


def test_only_losses_of_one_stage_on_the_same_data_are_comparable(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / "x" / str(n), lr=1.0, loss="KTO" if n == 2 else "NextToken") for n in range(5)
    ]
    audit = json.loads((runs[3] / "audit.json").read_text())
    audit["eval"]["sources"][0]["supervised"] = 21  # another tokenizer, for example
    (runs[3] / "audit.json").write_text(json.dumps(audit))
    (runs[4] / "audit.json").unlink()
    report([str(tmp_path)])
    shown = Page(tmp_path / "report.html").data["runs"]
    assert [(run["group"], run["ranked"]) for run in shown] == [
        ("NextToken: eval/loss on held out, 2 samples, 20 targets", True),
        ("NextToken: eval/loss on held out, 2 samples, 20 targets", True),
        ("KTO: eval/loss on held out, 2 samples, 20 targets", True),
        ("NextToken: eval/loss on held out, 2 samples, 21 targets", True),
        ("NextToken: eval/loss on unknown data", False),
    ]


def test_losses_with_other_options_of_a_stage_are_not_comparable(tmp_path: Path) -> None:
    for number, beta in enumerate((0.1, 0.1, 0.3)):
        run = finished(tmp_path / "x" / str(number), lr=1.0 + number)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["stage"] |= {"beta": beta, "label_smoothing": 0.0}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    report([str(tmp_path)])
    groups = [run["group"].partition("targets")[2] for run in Page(tmp_path / "report.html").data["runs"]]
    assert groups == [", stage.beta=0.1", ", stage.beta=0.1", ", stage.beta=0.3"]


def test_a_mean_flops_utilisation_comes_with_its_peak_or_not_at_all(tmp_path: Path) -> None:
    old = finished(tmp_path / "old", lr=1.0, results={"first": {}, "last": {"perf/mfu": 0.5}})
    new = finished(tmp_path / "new", lr=1.0, mfu_peak="the measured matmul peak")
    report([str(old)])
    report([str(new)])
    without, having = (Page(run / "report.html").data for run in (old, new))
    charts = [chart["key"] for chart in without["charts"]]
    assert "perf/mfu" not in [*charts, *without["runs"][0]["results"]]
    assert having["runs"][0]["results"]["perf/mfu"] == 0.25
    assert [chart["note"] for chart in having["charts"] if chart["key"] == "perf/mfu"] == [
        "of the measured matmul peak"
    ]


def test_seconds_of_training_are_sums_of_step_times(tmp_path: Path) -> None:
    """Rows 10 steps apart stand for 10 steps; so does the first one of a run that resumed at step 100."""
    rows = [{"step": 110, "perf/step_ms": 200.0}, {"step": 120, "perf/step_ms": 100.0}]
    rows += [{"step": 120, "eval/loss": 1.0}, {"step": 130, "perf/step_ms": 300.0}]
    found = read_curves(write_rows(tmp_path / "m.jsonl", *rows), 9, resumed=True)["train/seconds"]
    sparser = [{"step": step, "perf/step_ms": 100.0} for step in (1, 2, 3, 10, 20)]
    rising = read_curves(write_rows(tmp_path / "n.jsonl", *sparser), 9)["train/seconds"]
    assert rising.last == pytest.approx(2.0)
    assert found.means.tolist() == pytest.approx([2, 3, 6])


@pytest.mark.parametrize(
    ("point", "seconds"),
    [
        (None, 7.0),
        ("/a/checkpoints/step_00000003", 4.0),
        ("{folder}/a/checkpoints/step_00000005", 7.0),
    ],
    ids=["new", "of another run", "of the same run"],
)
def test_the_first_row_of_a_run_that_did_not_resume_stands_for_all_steps(
    tmp_path: Path, point: str | None, seconds: float
) -> None:
    """The last row may stand for fewer steps than the first."""
    place = {} if point is None else {"resumed_from": point.format(folder=tmp_path)}
    run = finished(tmp_path / "a", lr=1.0, **place)
    write_rows(run / "metrics.jsonl", *({"step": step, "perf/step_ms": 1000.0} for step in (5, 7)))
    (page,) = write_page("t", [Entry(0, run)], tmp_path / "page.html")
    assert page.curves["train/seconds"].last == seconds


def test_a_page_that_is_watched_is_rewritten_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = finished(tmp_path / "a" / "b", lr=1.0), []

    def sleep(seconds: float) -> None:
        assert seconds == WATCH_S
        data = Page(run / "report.html").data
        seen.append((data["refresh"], data["runs"][0]["steps"]))
        if len(seen) == 3:
            raise KeyboardInterrupt("SIGINT")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3 + len(seen), "train/loss": 1.0}) + "\n")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--watch"])
    assert run_or_answer(report, None) == DONE
    assert seen == [(WATCH_S, 3), (WATCH_S, 4), (WATCH_S, 5)]
    assert Page(run / "report.html").data["refresh"] is None


def test_another_signal_than_ctrl_c_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        raise KeyboardInterrupt("SIGTERM")

    run = finished(tmp_path / "a" / "b", lr=1.0)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--watch"])
    assert run_or_answer(report, None) == INTERRUPTED


def test_a_sweep_that_was_moved_finds_its_runs(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "there")
    (tmp_path / "there").rename(tmp_path / "here")
    moved = tmp_path / "here" / sweep.relative_to(tmp_path / "there")
    assert [run.steps for run in write_page("t", entries(moved), tmp_path / "page.html")][:2] == [3, 3]


def test_without_metrics_jsonl_there_are_the_last_values(tmp_path: Path) -> None:
    results = {"first": {}, "last": {"step": 3.0, "train/loss": 7.5, "eval/loss": 4.25}}
    run = finished(tmp_path / "a", lr=1.0, results=results)
    (run / "metrics.jsonl").unlink()
    report([str(run)])
    (shown,) = Page(run / "report.html").data["runs"]
    assert (shown["loss"], shown["steps"], shown["results"]["train/loss"]) == (4.25, 3.0, 7.5)


def test_what_the_program_writes_is_read(tmp_path: Path) -> None:
    """The results of an evaluation that diverged are neither the loss nor among the values."""
    results = Results()
    results.add({"step": 1, "train/loss": 7.5})
    results.add({"step": 1, "eval/loss": 4.25})
    for diverged in (False, True):
        if diverged:
            results.add({"step": 3, "eval/loss": math.nan})
        run = finished(tmp_path / str(diverged), lr=1.0, results=asdict(results))
        report([str(run)])
        (shown,) = Page(run / "report.html").data["runs"]
        assert (shown["status"], shown["missing"]) == ("completed", ["no preflight.json"])
        assert shown["loss"] == (None if diverged else 4.0)
        assert ("eval/loss" in shown["results"]) is not diverged
        assert shown["group"].startswith("NextToken: eval/loss on held out")


def test_rows_that_a_logger_did_not_write_are_not_the_last(tmp_path: Path) -> None:
    results = {"first": {}, "last": {"step": 8.0, "train/loss": 1.5}}
    run = finished(tmp_path / "a", lr=1.0, results=results)
    report([str(run)])
    (shown,) = Page(run / "report.html").data["runs"]
    assert shown["results"]["train/loss"] == 1.5


def test_the_command_of_a_job_runs_it_by_itself(tmp_path: Path) -> None:
    words = ["optimizer.lr=2.0", "sweep=lr_layout"]
    for command, expected in {
        ("runner", "--config-dir=cfg"): "--config-dir=cfg",
        ("runner", *words): "optimizer.lr=2.0 sweep=lr_layout hydra.mode=RUN",
    }.items():
        run = finished(tmp_path / str(len(command)), lr=1.0, command=list(command), overrides=words)
        assert arguments_of(run) == expected.split()
    place = {"folder": "s", "number": 0}
    facts = {"command": ["runner", "experiment=mine"], "overrides": ["experiment=mine", "run.seed=1"]}
    run = finished(tmp_path / "job", lr=1.0, **facts, sweep=place)
    assert arguments_of(run) == ["experiment=mine", "run.seed=1", "hydra.mode=RUN"]


def test_a_run_that_has_gone_is_told(tmp_path: Path) -> None:
    (run,) = write_page("t", [Entry(0, tmp_path / "gone", status="completed")], tmp_path / "page.html")
    assert run.missing == [f"{tmp_path}/gone is not there any more"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "FOLDER: none is given"),
        (["/nowhere"], "no such folder"),
        ([".", "/nowhere"], "/nowhere: no such folder"),
        ([".", "outputs=x"], "outputs: is not an option"),
        ([".", "output=/"], "output: / is a folder; name a file"),
        (["~nobody-at-all/x"], "FOLDER=~nobody-at-all/x: there is no user"),
        ([".", "output=~nobody-at-all/x"], "output=~nobody-at-all/x: there is no user"),
    ],
)
def test_mistakes(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(arguments)


def test_a_folder_may_have_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    assert parse([f"{tmp_path}/lr=1"]) == ([tmp_path / "lr=1"], tmp_path / "lr=1" / "report.html")


def test_several_folders_are_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of different folders are numbered anew, and a run that is in two of them is shown once."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sweep, alone = a_sweep(tmp_path / "there"), finished(tmp_path / "mine" / "stamp", lr=7.0)
    of_sweep = entries(sweep)
    report([str(alone), str(sweep), str(of_sweep[0].folder)])
    data = Page(tmp_path / "here" / "report.html").data
    assert data["title"].startswith("mine / stamp, sweeps / ")
    assert [run["number"] for run in data["runs"]] == [*range(len(of_sweep) + 1)]
    folders = [run["folder"] for run in data["runs"]]
    assert folders == [str(alone), *(entry.folder and str(entry.folder) for entry in of_sweep)]
    assert "optimizer.lr" in data["columns"]
    again = f"{tmp_path}/here/../mine/stamp"
    report([str(alone), str(alone), str(alone), again])
    data = Page(tmp_path / "here" / "report.html").data
    assert data["title"] == "4 folders"
    assert len(data["runs"]) == 1


@pytest.mark.parametrize("first", ["sweep", "run"])
def test_a_job_that_is_also_named_by_its_folder_keeps_its_record(tmp_path: Path, first: str) -> None:
    sweep = a_sweep(tmp_path)
    job = next(entry for entry in entries(sweep) if entry.folder is not None and entry.status is not None)
    folders = [sweep, job.folder] if first == "sweep" else [job.folder, sweep]
    found = all_entries([folder for folder in folders if folder is not None])
    (same,) = (entry for entry in found if entry.folder == job.folder)
    assert (same.status, same.seconds, same.overrides) == (job.status, job.seconds, job.overrides)


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_that_a_second_sweep_has_continued_has_its_record(tmp_path: Path, order: int) -> None:
    run = finished(tmp_path / "run", lr=1.0, sweep={"folder": str(tmp_path / "second"), "number": 0})
    for name, loss in (("first", 3.0), ("second", 2.0)):
        job = SweepJob(tmp_path / name, 0, ())
        job.write(JobRecord(0, (), "completed", str(run), loss=loss))
    (found,) = all_entries([tmp_path / "first", tmp_path / "second"][::order])
    assert found.loss == 2.0


def test_a_completion_may_have_other_separators_of_lines(tmp_path: Path) -> None:
    row = {"completion": "a\u2028b"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert read_completions(tmp_path / "x.jsonl") == [row]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run and no sweep"):
        entries(tmp_path)
    (tmp_path / "sweep.json").touch()
    with pytest.raises(ConfigError, match="no job of this sweep has begun"):
        entries(tmp_path)


def test_what_varies() -> None:
    assert varied_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "c": 3}]) == ["b", "c"]
    assert varied_keys([{"a": 1, "b": 2}]) == ["a", "b"]


def test_many_runs_leave_a_page_of_a_sane_size(tmp_path: Path) -> None:
    """The points per chart are bounded, so a page of 200 runs has no more of them than this one."""
    sweep = make_sweep(tmp_path, runs=3, steps=3000)
    report([str(sweep)])
    data = Page(sweep / "report.html").data
    lengths = {len(floats(curve["means"])) for chart in data["charts"] for curve in chart["curves"]}
    assert max(lengths) <= 333
    assert (sweep / "report.html").stat().st_size < 1e6
