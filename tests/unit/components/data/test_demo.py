"""The embedded data and its tokenizer."""

import inspect
import subprocess
import sys
import textwrap
from functools import lru_cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.contracts.data import SampleKind
from components.data.demo import SplitName, stdlib_records
from components.data.records.samples import ChatSample, PreferenceSample, Sample, TextSample
from components.data.tokenizer import PATH


@lru_cache
def records(kind: SampleKind, split: SplitName) -> list[tuple[Sample, str]]:
    return list(stdlib_records(kind, split))


def origins(kind: SampleKind, split: SplitName) -> list[str]:
    return [origin.rpartition(":")[0] for _, origin in records(kind, split)]


def test_chat_asks_what_a_definition_does_and_answers_with_its_docstring() -> None:
    found = [
        sample
        for sample, origin in records("chat", "train")
        if origin.rpartition(":")[0].endswith("/textwrap.py")
        and isinstance(sample, ChatSample)
        and "`dedent`" in sample.messages[0]["content"].replace("textwrap.", "")
    ]
    [sample] = found
    assert [message["role"] for message in sample.messages] == ["user", "assistant"]
    assert "textwrap" in sample.messages[0]["content"]
    assert sample.messages[1]["content"] == inspect.getdoc(textwrap.dedent)
    assert sample.tools is None


def test_there_are_thousands_of_samples_and_no_tests_among_them() -> None:
    paths = origins("chat", "train")
    assert len(paths) > 4000
    assert not any("/test/" in path or "site-packages" in path for path in paths)
    answers = [
        sample.messages[1]["content"]
        for sample, _ in records("chat", "train")
        if isinstance(sample, ChatSample)
    ]
    assert all(24 <= len(answer) <= 1200 for answer in answers)


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_a_module_is_in_one_split(kind: SampleKind) -> None:
    train, held_out = set(origins(kind, "train")), set(origins(kind, "eval"))
    assert not train & held_out
    assert 0.02 < len(held_out) / len(train | held_out) < 0.1


def test_kinds_agree_on_the_split() -> None:
    assert set(origins("chat", "eval")) <= set(origins("text", "eval"))


def test_text_is_the_source_of_a_module() -> None:
    sample, origin = next(iter(records("text", "train")))
    assert isinstance(sample, TextSample)
    assert sample.text == Path(origin.removesuffix(":1")).read_text(encoding="utf-8")


def test_rejected_is_another_docstring_of_the_module() -> None:
    answers: dict[str, set[str]] = {}
    for sample, origin in records("chat", "eval"):
        assert isinstance(sample, ChatSample)
        answers.setdefault(origin.rpartition(":")[0], set()).add(sample.messages[1]["content"])
    pairs = list(records("preference", "eval"))
    assert len(pairs) > 100
    for pair, origin in pairs:
        assert isinstance(pair, PreferenceSample)
        [chosen], [rejected] = pair.chosen, pair.rejected
        assert chosen["content"] != rejected["content"]
        assert {chosen["content"], rejected["content"]} <= answers[origin.rpartition(":")[0]]


def test_another_process_makes_the_same_samples() -> None:
    code = (
        "from components.data.demo import stdlib_records; import hashlib; "
        "print(hashlib.sha256(repr(list(stdlib_records('preference', 'eval'))).encode()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[4],
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]


def test_tokenizer_has_8192_tokens_and_a_stop_token_for_turns() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    assert len(tokenizer) == 8192
    assert tokenizer.is_fast
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|pad|>", "<|im_end|>", None)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_is_lossless_and_knows_python() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    for text in ("\tx = 1\r\n\n   y  ", "naïve 你好 🙂\x00\x7f", " leading", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    source = inspect.getsource(textwrap)
    assert len(tokenizer(source).input_ids) < len(source) / 3.5


def test_embedded_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
