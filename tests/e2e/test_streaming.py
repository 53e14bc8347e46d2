"""A run on a stream: the same curve on every layout, and after a resume on another one."""

import json
from pathlib import Path

import pyarrow
import pytest

from tests.e2e.commands import SMALL, call_here, curve, newest, rows, run_here

STREAM = (
    *SMALL,
    "stage=pt",
    "data=files",
    "data.streaming=true",
    "data.num_workers=1",
    "run.max_steps=6",
    "run.global_batch_size=8",
    "run.export=false",
    "checkpoint.save_every=3",
    "checkpoint.keep_last=0",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of two sources in compressed files; batches have rows of several chunks."""
    folder = tmp_path_factory.mktemp("data")
    for word, count in (("common", 90), ("rare", 12)):
        lines = "".join(json.dumps({"text": f"{word} {n} " * (5 + n % 40)}) + "\n" for n in range(count))
        packed = pyarrow.compress(lines.encode(), "gzip", asbytes=True)
        (folder / f"{word}.jsonl.gz").write_bytes(packed)
    blend = f"0.75 {folder}/common.jsonl.gz 0.25 {folder}/rare.jsonl.gz"
    return f"data.sources='{blend}'", "data.buffer_size=12"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, sources: tuple[str, ...]) -> Path:
    return run_here(tmp_path_factory.mktemp("single"), *STREAM, *sources)


def test_a_stream_leaves_nothing_behind(single: Path) -> None:
    assert not (single / "stream").exists()
    states = [
        json.loads(path.read_text())["state"] for path in sorted(single.glob("checkpoints/*/meta.json"))
    ]
    first, last = (state["stream_position"] for state in states)
    assert [0, 0] < first < last
    assert last[0] > 3  # chunks, each of which the process of rank 0 has made
    assert all("train/epoch" not in row for row in rows(single))


@pytest.mark.parametrize("layout", ["fsdp2", "tp2pp2"])
def test_a_stream_is_the_same_on_every_layout(
    tmp_path: Path, single: Path, sources: tuple[str, ...], layout: str
) -> None:
    run = run_here(tmp_path, *STREAM, *sources, f"parallelism={layout}")
    assert [row["train/loss"] for row in curve(run)] == pytest.approx(
        [row["train/loss"] for row in curve(single)], rel=1e-5
    )


@pytest.mark.parametrize("layout", ["single", "megatron_dp2"])
def test_a_stream_resumes_on_any_layout(
    tmp_path: Path, single: Path, sources: tuple[str, ...], layout: str
) -> None:
    point = f"checkpoint.resume={single}/checkpoints/step_00000003"
    options = (f"run.output_dir={tmp_path}", f"parallelism={layout}", point)
    assert call_here(*STREAM, *sources, *options) == 0
    left, again = curve(single)[3:], curve(newest(tmp_path))
    assert [row["step"] for row in again] == [4, 5, 6]
    if layout == "single":
        assert again == left
    assert [row["train/loss"] for row in again] == pytest.approx(
        [row["train/loss"] for row in left], rel=1e-5
    )


def test_a_chunk_that_cannot_be_read_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": f"word {n} " * 9}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    options = (f"data.train={tmp_path}/a.jsonl", "data.buffer_size=10", "data.packing=none")
    assert call_here(*STREAM, *options, "parallelism=fsdp2", f"run.output_dir={tmp_path}/runs") == 1
    assert "a.jsonl:41: malformed JSON" in capsys.readouterr().err
    assert [row["step"] for row in rows(newest(tmp_path / "runs"), "train/loss")] == [1, 2, 3, 4, 5]
