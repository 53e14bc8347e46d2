"""samples.json: decoded training samples with the pieces that are trained."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.contracts.data import SampleKind
from components.data import FilesData
from components.data.loader import SHOWN_SAMPLES
from components.data.tokenizer import PATH

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("kind", ["chat", "unpaired"])
def test_the_answers_are_the_trained_pieces(kind: SampleKind, tmp_path: Path) -> None:
    answers = [[{"role": "assistant", "content": f"Answer {n}."}] for n in range(6)]
    chats = [{"messages": [USER, *answer]} for answer in answers]
    labelled = [
        {"prompt": [{"role": "user", "content": f"Ask {n}"}], "completion": answer, "label": n % 2 == 0}
        for n, answer in enumerate(answers)
    ]
    rows = chats if kind == "chat" else labelled
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = FilesData(train=str(tmp_path / "x.jsonl"), cache_dir=str(tmp_path / "cache"), packing="none")
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    prepared = data.prepare(kind, tokenizer, seed=0, global_batch_size=2, max_steps=2, epochs=None)
    prepared.write_samples(tmp_path, tokenizer)
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert len(samples) == SHOWN_SAMPLES
    for (prompt, _), (answer, trained), *rest in samples:
        assert prompt.endswith("<|im_start|>assistant\n")
        assert trained
        assert answer in [f"Answer {n}.<|im_end|>" for n in range(6)]
        if kind == "unpaired":  # a mismatched answer has the number of another prompt
            assert answer.split()[1].startswith(prompt.partition("Ask ")[2][0])
        assert rest in ([["\n", False]], [])
