"""Records in TRL's documented formats give the tokens and labels that TRL's trainers give."""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from components.contracts.data import SampleKind
from components.data.data_sources import FileSource
from components.data.records.formats import detect, normalize
from components.data.records.options import RecordError, RecordOptions
from components.data.records.record_files import PairAnswer
from components.data.records.samples import UnpairedSample
from components.data.records.split_pairs import split_pairs
from components.data.tokenize.encoder import Encoder, with_kl_completions
from components.data.tokenizer import PATH

trl = pytest.importorskip("trl")

Rows = list[tuple[list[int], list[bool]]]
"""The token ids of each sequence, and which of them are trained on."""

QUESTION = [{"role": "user", "content": "What color is the sky?"}]
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, *QUESTION]
BLUE, GREEN = ([{"role": "assistant", "content": f"It is {color}."}] for color in ("blue", "green"))

TOOL = {"name": "look_at", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = [
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "look_at", "arguments": {"place": "sky"}}}],
    }
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
RESULT = [{"role": "tool", "name": "look_at", "content": "blue"}]

TEXT = {"text": "The sky is blue."}
CHATS: dict[str, dict[str, Any]] = {
    "turns": {"messages": [*EARLIER, *BLUE]},
    "tools": {"messages": [*SYSTEM, *QUESTION, *CALL, *RESULT, *BLUE], "tools": TOOLS},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "strings": {"prompt": "The sky is", "completion": " blue."},
    "messages": {"prompt": QUESTION, "completion": BLUE},
    "messages-of-several-turns": {"prompt": EARLIER, "completion": BLUE},
    "tools": {"prompt": [*SYSTEM, *QUESTION], "completion": CALL, "tools": TOOLS},
}
PAIRS: dict[str, dict[str, Any]] = {
    "strings": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "strings-implicit": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "messages": {"prompt": QUESTION, "chosen": BLUE, "rejected": GREEN},
    "messages-implicit": {"chosen": [*EARLIER, *BLUE], "rejected": [*EARLIER, *GREEN]},
    "tools": {"prompt": QUESTION, "chosen": CALL, "rejected": GREEN, "tools": TOOLS},
    "results": {"prompt": [*QUESTION, *CALL, *RESULT], "chosen": BLUE, "rejected": GREEN, "tools": TOOLS},
}
UNPAIRED: dict[str, dict[str, Any]] = {
    "strings": {"prompt": "The sky is", "completion": " blue.", "label": True},
    "messages": {"prompt": QUESTION, "completion": GREEN, "label": False},
    "tools": {"prompt": [*SYSTEM, *QUESTION], "completion": CALL, "label": True, "tools": TOOLS},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model from a folder: the trainers read its name."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=8192, **size)).save_pretrained(folder)
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(folder)
    return model


def ours(
    record: dict[str, Any],
    kind: SampleKind,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on_prompt: bool = False,
) -> Rows:
    options = RecordOptions(format=detect(record, kind, "x:1"))
    encoder = Encoder(tokenizer, kind, None, "truncate", train_on_prompt, options)
    items: Any = iter([(record, "x:1")] * 2)
    chunk = encoder(list(with_kl_completions(items, options) if kind == "unpaired" else items)[:1])
    ends = chunk.lengths.cumsum()
    spans = zip(ends - chunk.lengths, ends, strict=True)
    rows = [(chunk.tokens[a:b].tolist(), chunk.mask[a:b].tolist()) for a, b in spans]
    return rows[:1] if kind == "unpaired" else rows


def trained(
    trainer: type, config: type, record: dict[str, Any], tmp_path: Path, **kwargs: Any
) -> dict[str, Any]:
    """Return the first row of the data set that a trainer prepared."""
    model, tokenizer, options = kwargs.pop("model"), kwargs.pop("tokenizer"), kwargs
    made = trainer(
        model=model,
        args=config(output_dir=str(tmp_path), report_to="none", use_cpu=True, **options),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([record] * 2),
    )
    row: dict[str, Any] = made.train_dataset[0]
    return row


def without_blanks_after_the_stop_token(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """TRL trains the line break that a template writes after the last turn, which ends nothing."""

    def is_blank(ids: list[int], place: int) -> bool:
        return not tokenizer.decode(ids[place:]).strip()

    return [(ids, [on and not is_blank(ids, t) for t, on in enumerate(mask)]) for ids, mask in rows]


def labelled(row: dict[str, Any]) -> Rows:
    return [(row["input_ids"], [label >= 0 for label in row["labels"]])]


def split_at(prompt: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_documents(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, tmp_path: Path, end: str
) -> None:
    record = {"text": TEXT["text"] + end}
    row = trained(trl.SFTTrainer, trl.SFTConfig, record, tmp_path, model=model, tokenizer=tokenizer)
    assert ours(record, "text", tokenizer) == [(row["input_ids"], [True] * len(row["input_ids"]))]


@pytest.mark.parametrize("record", CHATS.values(), ids=CHATS)
def test_conversations(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, tmp_path: Path, record: dict[str, Any]
) -> None:
    row = trained(trl.SFTTrainer, trl.SFTConfig, record, tmp_path, model=model, tokenizer=tokenizer)
    [(ids, mask)] = ours(record, "chat", tokenizer, train_on_prompt=True)
    assert ids == row["input_ids"]
    assert all(mask)
    marked = trained(
        *(trl.SFTTrainer, trl.SFTConfig, record, tmp_path),
        model=model,
        tokenizer=tokenizer,
        assistant_only_loss=True,
    )
    expected = without_blanks_after_the_stop_token(labelled(marked), tokenizer)
    assert ours(record, "chat", tokenizer) == expected
    assert ("look_at" in tokenizer.decode(ids)) == ("tools" in record), "tools and calls are written"


@pytest.mark.parametrize("record", COMPLETIONS.values(), ids=COMPLETIONS)
def test_prompts_and_completions(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, tmp_path: Path, record: dict[str, Any]
) -> None:
    row = trained(trl.SFTTrainer, trl.SFTConfig, record, tmp_path, model=model, tokenizer=tokenizer)
    assert ours(record, "chat", tokenizer) == without_blanks_after_the_stop_token(labelled(row), tokenizer)


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_pairs(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, tmp_path: Path, record: dict[str, Any]
) -> None:
    row = trained(trl.DPOTrainer, trl.DPOConfig, record, tmp_path, model=model, tokenizer=tokenizer)
    expected = [split_at(row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected")]
    assert ours(record, "preference", tokenizer) == without_blanks_after_the_stop_token(expected, tokenizer)


@pytest.mark.parametrize("record", UNPAIRED.values(), ids=UNPAIRED)
def test_labelled_completions(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, tmp_path: Path, record: dict[str, Any]
) -> None:
    row = trained(trl.KTOTrainer, trl.KTOConfig, record, tmp_path, model=model, tokenizer=tokenizer)
    expected = [split_at(row["prompt_ids"], row["completion_ids"])]
    assert ours(record, "unpaired", tokenizer) == without_blanks_after_the_stop_token(expected, tokenizer)


@pytest.mark.parametrize("template", ["phi3", "phi3_training", "phi3_5", "phi3_5_training", "gptoss"])
def test_turns_of_templates_that_end_the_last_one_differently(template: str) -> None:
    """The marks of TRL's own training templates; they include the header of gpt-oss and line breaks."""
    folder = Path(trl.__file__).parent / "chat_templates"
    marked = (folder / f"{template.removesuffix('_training')}_training.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    special = sorted({*re.findall(r"<\|\w+\|>", marked)})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    messages = [*EARLIER, {"role": "assistant", "content": "Blue.\n"}, *EARLIER, *BLUE]
    theirs = tokenizer.apply_chat_template(
        messages, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
    )
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    [(ids, mask)] = ours({"messages": messages}, "chat", tokenizer)
    expected = runs(theirs["input_ids"], theirs["assistant_masks"], tokenizer)
    assert runs(ids, mask, tokenizer) == [
        text.removeprefix("<|start|>assistant").rstrip() for text in expected
    ]


def runs(ids: list[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [tokenizer.decode([token for token, _ in run]) for on, run in pairs if on]


def test_pairs_are_split_as_by_trl(tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"{i}?", "chosen": f" {i}.", "rejected": None if i == 5 else " no."} for i in range(1002)
    ]
    expected = trl.unpair_preference_dataset(datasets.Dataset.from_list(pairs)).to_list()
    assert {len(expected), sum(row["completion"] is None for row in expected)} == {2004, 1}
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    split = []
    found = FileSource(option="data.train", path=str(path)).items("unpaired")
    assert found.splits_pairs
    for item, origin in split_pairs(found.items):
        assert isinstance(item, PairAnswer)
        if origin.endswith(":6"):
            with pytest.raises(RecordError, match="rejected"):
                normalize(item, RecordOptions(format="preference"), origin)
            continue
        sample, _ = normalize(item, RecordOptions(format="preference"), origin)
        assert isinstance(sample, UnpairedSample)
        split.append({"prompt": sample.prompt, "completion": sample.completion, "label": sample.desirable})
    assert split == [row for row in expected if row["prompt"] != "5?"]
