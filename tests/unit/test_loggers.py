"""Every logger, read back with the tools of its users."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.loggers import Jsonl, JsonlLogger, MultiLogger, Tensorboard, Wandb
from runner.errors import ConfigError

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, float | int | None]] = [
    {"step": 1, "train/loss": 2.5, "train/num_tokens": 512, "train/num_zeros_in_grad": None},
    {"step": 2, "train/loss": 2.25, "train/num_tokens": 480},
    {"step": 2, "eval/loss": 2.125},
]
CONFIG: dict[str, Any] = {"run": {"seed": 0}, "model": {"path": None}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "sft" / "stamp").mkdir(parents=True)
    return tmp_path / "sft" / "stamp"


def read_jsonl(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_on_disk_after_every_row(run_dir: Path) -> None:
    logger = Jsonl().open(run_dir, CONFIG)
    for number, row in enumerate(ROWS, start=1):
        logger.log(row)
        assert read_jsonl(run_dir) == ROWS[:number]
    logger.close()
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_jsonl_keeps_the_key_of_a_number_json_cannot_write(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "new" / "m.jsonl")
    logger.log({"step": 3, "a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": None, "e": 0})
    logger.close()
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
        logger.close()
    assert [row["step"] for row in read_jsonl(tmp_path)] == [1, 2]


def test_multi_logger_passes_every_row_on(tmp_path: Path) -> None:
    logger = MultiLogger(*(JsonlLogger(tmp_path / name / "metrics.jsonl") for name in "ab"))
    logger.log(ROWS[0])
    logger.close()
    assert read_jsonl(tmp_path / "a") == read_jsonl(tmp_path / "b") == ROWS[:1]


def test_tensorboard_reads_what_was_logged(run_dir: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Tensorboard().check()
    logger = Tensorboard().open(run_dir, CONFIG)
    for row in ROWS:
        logger.log(row)
    logger.close()
    events = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "train/loss": [(1, 2.5), (2, 2.25)],
        "train/num_tokens": [(1, 512.0), (2, 480.0)],
        "eval/loss": [(2, 2.125)],
    }
    assert "config/text_summary" in events.Tags()["tensors"]
    assert read_jsonl(run_dir) == ROWS


WANDB_RUN = """
import json, sys
from pathlib import Path
from components.loggers import Wandb
wandb = Wandb(project="tests", mode="offline", tags=("a",))
wandb.check()
rows, config = json.loads(sys.argv[2])
logger = wandb.open(Path(sys.argv[1]), config)
for row in rows:
    logger.log(row)
logger.close()
"""


def wandb_records(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB behind a 7-byte file header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_wandb_offline_reads_what_was_logged(run_dir: Path) -> None:
    pytest.importorskip("wandb")
    arguments = [str(run_dir), json.dumps([ROWS, CONFIG])]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(run_dir.parent), "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", WANDB_RUN, *arguments],
        check=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    (file,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    records = wandb_records(file)
    history = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    found: dict[int, dict[str, Any]] = {}
    for entry in history:
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.item}
        found[values["_step"]] = {key: value for key, value in values.items() if not key.startswith("_")}
    assert found == {
        1: {"train/loss": 2.5, "train/num_tokens": 512},
        2: {"train/loss": 2.25, "train/num_tokens": 480, "eval/loss": 2.125},
    }
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, list(run.tags)) == ("tests", "sft/stamp", ["a"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config.items() >= CONFIG.items()
    assert read_jsonl(run_dir) == ROWS


def test_wandb_online_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"logger.mode: is online, .*WANDB_API_KEY.*logger.mode=offline"):
        Wandb().check()
    Wandb(mode="offline").check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.loggers.find_spec", lambda _: None)
    for description, package in ((Tensorboard(), "tensorboard"), (Wandb(), "wandb")):
        with pytest.raises(ConfigError, match=f"logger={package}: .*pip install {package}"):
            description.check()
    Jsonl().check()


def test_refuses_impossible_values() -> None:
    with pytest.raises(ConfigError, match=r"logger.flush_secs"):
        Tensorboard(flush_secs=0)


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    heavy = "('torch', 'wandb', 'tensorboard')"
    code = f"import sys, components.loggers; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
