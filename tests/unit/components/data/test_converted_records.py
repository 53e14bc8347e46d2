"""``FilesData.convert`` of a subclass changes records before their format is looked at."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.data import FilesData
from components.data.data_sources import FileSource, SourceItem
from components.data.records.record_files import Unreadable
from components.data.tokenize.workers import _own_code

RECORDS = [{"a": {"q": f"{n}?", "r": [f"{n}."]}} for n in range(3)]


@dataclass(frozen=True, kw_only=True)
class Nested(FilesData):
    def convert(self, record: Any) -> Any:
        return {"prompt": record["a"]["q"], "completion": record["a"]["r"][-1]}


def items(tmp_path: Path, records: list[Any], **options: Any) -> list[SourceItem]:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    ((source, _),) = Nested(train=str(path), **options).train_sources()
    found = source.items("chat")
    assert found.format == "prompt_completion"
    assert found.fraction() is not None
    return list(found.items)


def test_every_record_is_converted(tmp_path: Path) -> None:
    found = [record for record, _ in items(tmp_path, RECORDS)]
    assert found == [{"prompt": f"{n}?", "completion": f"{n}."} for n in range(3)]


@dataclass(frozen=True, kw_only=True)
class Shouting(FilesData):
    end: str = "!"
    words: frozenset[str] = frozenset("abc")

    def convert(self, record: Any) -> Any:
        return {"text": record["text"].upper() + self.end}


def test_its_options_are_part_of_the_content(tmp_path: Path) -> None:
    """And so are the modules that its own imports; those of a package are not."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a"}\n')

    def content(**options: Any) -> list[str]:
        ((source, _),) = Shouting(train=str(path), **options).train_sources()
        return source.content(tmp_path)

    assert content() == content(max_length=7) == content(num_workers=2)
    assert content() != content(end="?")


def test_a_module_that_it_imports_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_words.py").write_text("END = '!'\n\ndef shout(text):\n    return text + END\n")
    (tmp_path / "my_source.py").write_text(
        "import json\nfrom my_words import END\n\ndef convert(record):\n    return {'text': END}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    convert = importlib.import_module("my_source").convert
    found = _own_code(FileSource(option="data.train", path="a.jsonl", convert=convert))
    assert "END = '!'" in found
    assert "def convert" in found
    assert "class JSONDecoder" not in found


def test_a_record_that_cannot_be_converted_is_a_bad_record(tmp_path: Path) -> None:
    records = [{"a": {"q": "?", "r": []}}, *RECORDS]
    first, *others = (record for record, _ in items(tmp_path, records, on_bad_record="skip"))
    assert isinstance(first, Unreadable)
    assert len(others) == len(RECORDS)
    with pytest.raises(
        ConfigError, match=r"records.jsonl:1: convert raised IndexError: .* The fields are a;"
    ):
        items(tmp_path, records)
