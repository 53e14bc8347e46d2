"""``FilesData.convert`` of a subclass changes records before their format is looked at."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.data import FilesData
from components.data.data_sources import SourceItem
from components.data.records.record_files import Unreadable

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


def test_a_record_that_cannot_be_converted_is_a_bad_record(tmp_path: Path) -> None:
    records = [{"a": {"q": "?", "r": []}}, *RECORDS]
    first, *others = (record for record, _ in items(tmp_path, records, on_bad_record="skip"))
    assert isinstance(first, Unreadable)
    assert len(others) == len(RECORDS)
    with pytest.raises(
        ConfigError, match=r"records.jsonl:1: convert raised IndexError: .* The fields are a;"
    ):
        items(tmp_path, records)
