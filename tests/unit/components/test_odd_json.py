"""JSON files with odd contents end as one line that names the file, wherever they are read."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from components.checkpoint import read_meta
from components.contracts.errors import ConfigError
from components.data.records.record_files import Unreadable, read_records
from components.json_text import read_json
from components.models.generate import read_generation_config
from components.report.runs import Entry, read_run
from runner.records.failures import read_failure_reports
from runner.records.job_record import read_job_records
from runner.records.run_dir import reopen_run_folder
from runner.records.run_record import RunRecord, SweepPlace
from runner.sweeps.sweep import create_sweep
from runner.training.pruner import pruner_of
from runner.training.state import TrainState

ODD_TEXT = {
    "nested too deeply": "[" * 100_000,
    "objects too deep": '{"a":' * 100_000,
    "an integer of 5,000 digits": '{"a": ' + "1" * 5000 + "}",
    "half of a surrogate pair": '{"a": "\\ud800"}',
    "no object": "5",
    "torn": '{"a": 1',
}
GOOD_META = {"state": {"step": 3}, "identity": {}, "model_only": False, "files": {}}
ODD_META = [
    {},
    GOOD_META | {"state": 5},
    GOOD_META | {"state": {"step": "three"}},
    GOOD_META | {"files": {"a": 3}},
    GOOD_META | {"files": []},
    GOOD_META | {"model_only": "perhaps"},
]
ODD_RUNS = [
    {"ended": 5},
    {"world_size": "x"},
    {"stopped": {"step": 1}},
    {"results": [1]},
    {"overrides": 5},
]
ODD_JOBS = [
    {},
    {"number": 0, "overrides": 5, "status": "completed"},
    {"number": 0, "overrides": [], "status": "weird"},
]


def read_as_records(path: Path) -> object:
    for record, _ in read_records(str(path)):
        assert isinstance(record, Unreadable)
        raise record.error
    return None


def read_as_jsonl(path: Path) -> object:
    return read_as_records(path.rename(path.with_suffix(".jsonl")))


def checkpoint(folder: Path, text: str) -> Path:
    (folder / "meta.json").write_text(text)
    (folder / "complete").write_text(f"{zlib.crc32(text.encode()):08x}")
    return folder


@pytest.mark.parametrize("name", ODD_TEXT)
@pytest.mark.parametrize("read", [read_json, read_as_jsonl, read_as_records])
def test_a_file_of_a_user_is_refused(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(ODD_TEXT[name])
    with pytest.raises(ConfigError, match=r"odd\.json"):
        read(path)


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), *map(json.dumps, ODD_META)])
def test_a_checkpoint_with_odd_metadata_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta\.json is damaged, or of a later version"):
        read_meta(checkpoint(tmp_path, text))


@pytest.mark.parametrize("state", [{"step": 3, "later": 1}, {"step": 3, "num_tokens": "many"}])
def test_a_state_of_another_version_is_refused(state: dict[str, object], tmp_path: Path) -> None:
    assert TrainState.read(checkpoint(tmp_path, json.dumps(GOOD_META))).step == 3
    with pytest.raises(ConfigError, match="of another version"):
        TrainState.read(checkpoint(tmp_path, json.dumps(GOOD_META | {"state": state})))


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), *map(json.dumps, ODD_RUNS)])
def test_an_odd_run_is_refused_and_costs_the_report_only_its_facts(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: is damaged, or of a later version"):
        RunRecord.read(tmp_path)
    if '"world_size"' not in text and '"stopped"' not in text:
        assert any("run.json cannot be read" in line for line in read_run(Entry(0, tmp_path), 10).missing)


def test_a_run_of_a_later_version_is_read_unless_its_words_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"ended": "completed", "later": {"a": 1}}')
    assert RunRecord.read(tmp_path).engine_facts == {"later": {"a": 1}}
    (tmp_path / "run.json").write_text('{"ended": "suspended"}')
    with pytest.raises(ConfigError, match=r"run\.json: is damaged, or of a later version \(ended"):
        RunRecord.read(tmp_path)


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), *map(json.dumps, ODD_JOBS)])
def test_an_odd_job_costs_no_other(text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/0.json").write_text(text)
    (tmp_path / "jobs/1.json").write_text('{"number": 1, "overrides": ["a=1"], "status": "done"}')
    odd, good = read_job_records(tmp_path)
    assert (odd.number, odd.status) == (0, "failed")
    assert "0.json cannot be read" in str(odd.error)
    assert good.status == "completed"


@pytest.mark.parametrize("audit", [{"train": {"sources": 5}}, {"train": {"sources": [5]}}, [1]])
def test_an_odd_audit_costs_the_report_only_that(audit: object, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    assert any("audit.json cannot be read" in line for line in read_run(Entry(0, tmp_path), 10).missing)


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), '{"eos_token_id": "</s>"}', '{"eos_token_id": [null]}'])
def test_an_odd_generation_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *ODD_TEXT.values(),
        "{}",
        '{"target": 5, "options": {}}',
        '{"target": "nowhere:Pruner", "options": {}}',
        '{"target": "json:nothing", "options": {}}',
        '{"target": "json:loads", "options": {"a": 1}}',
    ],
)
def test_an_odd_pruner_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "pruner.json").write_text(text)
    with pytest.raises(ConfigError, match=r"pruner\.json"):
        pruner_of(SweepPlace(str(tmp_path), 0))


@pytest.mark.parametrize("text", ODD_TEXT.values())
def test_an_odd_sweep_is_not_resumed(text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/0.json").write_text("{}")
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match=r"sweep\.json"):
        create_sweep(tmp_path, [], resumes=True)


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), "{}", '{"rank": "first"}'])
def test_an_odd_failure_report_comes_last(text: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/error_3.json").write_text(text)
    (report,) = read_failure_reports(tmp_path)
    assert (report.rank, report.time) == (3, float("inf"))
    assert "error_3.json cannot be read" in report.text


@pytest.mark.parametrize("text", [*ODD_TEXT.values(), "null", "{}", '{"step": "x"}', "\udcff"])
def test_odd_metrics_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{text}\n", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is damaged"):
        reopen_run_folder(tmp_path, 3)


def test_completions_of_later_steps_are_removed(tmp_path: Path) -> None:
    for name in ("completions", "completions/other"):
        (tmp_path / name).mkdir()
        for step in (3, 4):
            (tmp_path / name / f"step_{step:08}.jsonl").write_text("{}")
    reopen_run_folder(tmp_path, 3)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl"))
    assert left == ["completions/other/step_00000003.jsonl", "completions/step_00000003.jsonl"]


@pytest.mark.parametrize("name", ["checkpoints", "export", "logs"])
def test_a_file_where_a_folder_should_be_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=f"{name}: is a file"):
        reopen_run_folder(tmp_path, 3)
