"""Files of the cache that were changed after they were written are found, and made again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.contracts.data import BatchShard
from components.data import FilesData, PreparedData
from components.data.store import digests
from components.data.tokenizer import PATH
from tests.unit.components.data.store.test_token_store import empty, flip

PLANS = ["segments.npy", "row_offsets.npy", "repeats.npy", "rows.npy"]
TOKENS = ["tokens", "mask", "offsets", "supervised", "flags", "records", "meta.json"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def prepare(folder: Path) -> PreparedData:
    """Conversations, half of which an epoch contains, such that later epochs are counted."""
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "These."}]
    records = [{"messages": [turns[0] | {"content": f"{n} " * (n + 1)}, turns[1]]} for n in range(20)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = FilesData(
        sources=[{"path": str(folder / "train.jsonl"), "repeats": 0.5}],
        max_length=64,
        cache_dir=str(folder / "cache"),
    )
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    return data.prepare("chat", tokenizer, seed=0, global_batch_size=2, max_steps=None, epochs=3)


def trained_on(prepared: PreparedData) -> list[object]:
    loader = prepared.train_loader(BatchShard(global_batch_size=2, micro_batch_size=1))
    steps = range(loader.num_steps)
    return [
        [(batch.input_ids.tolist(), batch.labels.tolist()) for batch in loader.microbatches(step)]
        + [loader.sample_ids(step)]
        for step in steps
    ]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in (*TOKENS, *PLANS, "memo of a digest") for damage in (flip, Path.unlink)),
        # The other files are read by the same functions.
        *((name, damage) for name in ("tokens", "segments.npy", "meta.json") for damage in (empty, cut)),
    ],
)
def test_damage_is_found_and_made_good(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], object],
) -> None:
    monkeypatch.setattr(digests, "_MEMO_BYTES", 1)
    prepared = prepare(tmp_path)
    before = trained_on(prepared)
    pattern = "digests/*" if name not in (*TOKENS, *PLANS) else f"**/{name}"
    files = [path for path in (tmp_path / "cache").glob(pattern) if path.is_file()]
    assert files
    for file in files:
        damage(file)
    again = prepare(tmp_path)
    assert (again, trained_on(again)) == (prepared, before)
    if name in (*TOKENS, "segments.npy", "row_offsets.npy"):  # other files are made again without a word
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(files)
        assert all("; tokenised again." in line or "; planned again." in line for line in lines)
    caplog.clear()
    assert trained_on(prepare(tmp_path)) == before
    assert not caplog.records
