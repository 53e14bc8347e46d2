"""Small versions of the files of benchmarks/baselines."""

import json
from pathlib import Path
from unittest import mock

from benchmarks.baselines import samples
from benchmarks.baselines.arguments import MAX_LENGTH

WORDS = (
    "a",
    "packed",
    "row",
    "keeps",
    "what",
    "stands",
    "in",
    "it",
    "apart",
    "once",
    "prompt",
    "shared",
    "is",
)
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def text(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed + 3)) % len(WORDS)] for i in range(count))


def small_source(folder: Path) -> Path:
    """Write files like the public ones, with one pair of five that is too long."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = [{"instruction": text(i, 5), "input": "", "output": text(i + 1, 9 + i)} for i in range(8)]
    pairs = [
        {
            "conversations": [{"from": "human", "value": text(i, 12)}],
            "chosen": {"from": "gpt", "value": text(i + 2, 7 + i)},
            "rejected": {"from": "gpt", "value": text(i + 3, 4 + 2 * i)},
        }
        for i in range(4)
    ]
    too_long = pairs[0] | {"rejected": {"from": "gpt", "value": text(1, 4 * MAX_LENGTH)}}
    documents = [json.dumps({"text": text(i, 400)}) for i in range(4)]
    (folder / "alpaca_en_demo.json").write_text(json.dumps(chats))
    (folder / "dpo_en_demo.json").write_text(json.dumps([*pairs, too_long]))
    (folder / "c4_demo.jsonl").write_text("\n".join(documents))
    (folder / "wiki_demo.txt").write_text(text(5, 50))
    return folder


def small_data(folder: Path) -> Path:
    """Return a data folder of the benchmark, made from `small_source`, with a model of two layers."""
    source, data = small_source(folder / "source"), folder / "data"
    data.mkdir()
    with mock.patch.multiple(samples, VOCABULARY=300, SHAPE=SHAPE):
        samples.make_samples(source, data)
    return data
