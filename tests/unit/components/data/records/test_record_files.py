"""Each kind of file yields its records, and an invalid file is refused by name."""

import csv
import json
import os
from io import StringIO
from pathlib import Path
from unittest import mock

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from components.contracts.errors import ConfigError
from components.data.data_sources import FileSource
from components.data.records import record_files
from components.data.records.record_files import Reading, Unreadable, matching_files, read_records
from components.json_text import parse_json

RECORDS = [{"text": "one"}, {"text": 'two, "2"\nwith a line'}, {"text": "drei 🙂"}]
SHARED = Path(__file__).resolve().parents[6] / "shared" / "data"


def write(path: Path) -> Path:
    """Write the three records in the format of the suffix."""
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(RECORDS, indent=2), encoding="utf-8")
        case ".jsonl":
            lines = (json.dumps(record) for record in RECORDS)
            path.write_text("\n\n".join(lines), encoding="utf-8")
        case ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, ["text"])
                writer.writeheader()
                writer.writerows(RECORDS)
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
        case ".txt":
            path.write_text("one\n\n  two  \r\ndrei 🙂", encoding="utf-8")
        case "":
            datasets.Dataset.from_list(RECORDS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.json", [1, 2, 3]),
        ("a.jsonl", [1, 3, 5]),
        ("a.csv", [2, 3, 5]),
        ("a.parquet", [1, 2, 3]),
        ("a.JSON", [1, 2, 3]),
        ("saved", [1, 2, 3]),
    ],
)
def test_every_kind_yields_the_same_records(tmp_path: Path, name: str, places: list[int]) -> None:
    path = write(tmp_path / name.lower()).rename(tmp_path / name)
    assert list(read_records(str(path))) == [
        (record, f"{path}:{place}") for record, place in zip(RECORDS, places, strict=True)
    ]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_a_compressed_file_is_read_as_its_content(tmp_path: Path, name: str, codec: str) -> None:
    plain = write(tmp_path / name)
    packed = tmp_path / f"{name}.{'gz' if codec == 'gzip' else 'ZST'}"
    packed.write_bytes(pyarrow.compress(plain.read_bytes(), codec, asbytes=True))
    expected = [
        (record, origin.replace(str(plain), str(packed))) for record, origin in read_records(str(plain))
    ]
    plain.unlink()
    assert list(read_records(str(packed))) == list(read_records(str(tmp_path))) == expected
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"cannot be read \(.*\). Check the file"):
        list(read_records(str(packed)))


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_nulls_that_arrow_adds_are_no_arguments_of_a_call(tmp_path: Path, kind: str) -> None:
    calls = [{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {"unit": "K"}}]
    table = [{"calls": [call], "label": None} for call in calls]
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    else:
        path = tmp_path / "saved"
        datasets.Dataset.from_list(table).save_to_disk(path)
    assert [record for record, _ in read_records(str(path))] == table


def test_a_line_of_txt_is_a_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    found = [(record["text"], origin) for record, origin in read_records(str(path))]
    assert found == [("one", f"{path}:1"), ("  two  ", f"{path}:3"), ("drei 🙂", f"{path}:4")]


def test_folder_is_read_in_order_and_without_hidden_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/c.csv", "d.txt", "a.jsonl", ".hidden.json", "_SUCCESS.txt"):
        write(tmp_path / name)
    for name in ("README.md", "b/c.tsv", "d.jsonl.bz2"):
        (tmp_path / name).write_text("not data")
    files = [origin.rpartition(":")[0] for _, origin in read_records(str(tmp_path))]
    assert files == [str(tmp_path / name) for name in ("a.jsonl", "b/c.csv", "d.txt") for _ in range(3)]
    assert caplog.messages == []  # records are also read in processes without a log
    FileSource(option="data.train", path=str(tmp_path)).files(tmp_path / ".cache")
    [message] = caplog.messages
    assert message.endswith(f"parquet, .txt: 2, such as {tmp_path}/b/c.tsv")


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        write(folder / "a.jsonl")
    (data / "b").symlink_to(elsewhere)
    (elsewhere / "c").symlink_to(data)  # leads back
    (data / "d").symlink_to(data / "b")  # the same folder again
    (data / "e").symlink_to(tmp_path)  # around both
    (data / ".f").symlink_to(tmp_path / "other")
    files = [origin.rpartition(":")[0] for _, origin in read_records(str(data))]
    assert files == [str(data / name) for name in ("a.jsonl", "b/a.jsonl") for _ in range(3)]
    assert matching_files(str(data)) == [data / "a.jsonl", data / "b/a.jsonl"]


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # permission bits do not stop a test that runs as root
    with pytest.raises(
        ConfigError, match=r"/b: cannot be read \(Permission denied\). Change its permissions, or move"
    ):
        read_records(str(tmp_path))


@pytest.mark.parametrize("lines", [1, 3])
def test_json_that_is_jsonl_and_a_byte_order_mark(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + "\n".join(map(json.dumps, RECORDS[:lines])) + "\n", encoding="utf-8")
    assert [record for record, _ in read_records(str(path))] == RECORDS[:lines]


def test_json_that_is_jsonl_is_not_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n" + '{"text": "x"}\n' * 9)
    with mock.patch.object(record_files, "parse_json", side_effect=parse_json) as parse:
        all_readable(str(path))
    assert {call.args[0].strip() for call in parse.call_args_list} == {'{"text": "x"}'}


def test_cell_beyond_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 200_000)
    [(record, _)] = read_records(str(path))
    assert len(record["text"]) == 200_000


def all_readable(path: str) -> None:
    for record, _ in read_records(path):
        if isinstance(record, Unreadable):
            raise record.error


def test_jsonl_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{broken')
    records = read_records(str(path))
    assert next(records)[0] == {"text": "fine"}
    torn, origin = next(records)
    assert isinstance(torn, Unreadable)
    assert str(torn.error).startswith(f"{origin}: malformed JSON")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no record"),
        ("a.json", b"[]", "holds no record"),
        ("a.json", b" ", "holds no record"),
        ("a.txt", b"\n\n", "holds no record"),
        ("a.csv", b"text\n", "holds no record"),
        ("a.json", b'[{"text": 1},\n {"text" 2}]', "a.json:2: malformed JSON"),
        ("a.json", b'{\n"text": "x"}', "a.json: is a JSON object, not a list of objects"),
        ("a.json", b'"text"', "a.json: is a JSON string, not a list of objects"),
        ("a.json", b'[{"text": "x"}, 3]', "a.json:2: is a JSON int, not an object"),
        ("a.jsonl", b'{"text": "x"}\n["x"]', "a.jsonl:2: is a JSON list, not an object"),
        ("a.json", b'{"text": "x"}\n{"text": "x"', "a.json:2: malformed JSON"),
        ("a.json", b'{\r\n  "turns": [\r\n    {"role" "user"}\r\n  ]\r\n}', "a.json:3: malformed JSON"),
        (
            "a.jsonl",
            b'{"text": 1\n{"text": "x"}',
            "a.jsonl:1: malformed JSON (Expecting ',' delimiter, column 11)",
        ),
        ("a.csv", b"a,a\n1,2", "a.csv:1: is not a header with distinct field names"),
        (
            "a.csv",
            b"I am a document of some length and there is no header before me to say so.\nx",
            "not a header",
        ),
        ("a.csv", b"text,label\nx,1\nonly one\n", "a.csv:3: has 1 cells under 2 names"),
        ("a.csv", b"text\nx,1\n", "a.csv:2: has 2 cells under 1 names"),
        ("a.csv", b'text\n"open', "a.csv:2: malformed csv"),
        ("a.parquet", b"PAR1 no parquet", "a.parquet: is not a readable parquet file"),
        ("a.parquet", b"", "a.parquet: is not a readable parquet file"),
        ("a.txt", b"tea\ncaf\xe9", "a.txt:2: is not UTF-8 (byte 0xe9)"),
        ("a.json", b'["tea",\n"caf\xe9"]', "a.json:2: is not UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", "a.csv:2: is not UTF-8"),
        ("a.csv", b"caf\xe9\ntea\n", "a.csv:1: is not UTF-8"),
        ("a.xlsx", b"x", "cannot read a file with '.xlsx'"),
        ("data", b"x", "cannot read a file with 'no extension'"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        all_readable(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}\n'),
        ("a.json", b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}\n'),
        ("a.json", b'{"text": "a"}\n{"text" "x"}\n{"text": "b"}\n'),
        ("a.json", b'{"text": "a"\n{"text": "b"}\n{"text": "c"}\n'),
        ("a.csv", b"text\na\n\xe9\nb\n"),
        ("a.txt", b"a\n\xe9\nb\n"),
    ],
)
def test_records_around_an_unreadable_line_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = list(read_records(str(path)))
    assert len(found) == 3
    [(unread, origin)] = [item for item in found if isinstance(item[0], Unreadable)]
    assert isinstance(unread, Unreadable)
    assert str(unread.error).startswith(f"{origin}: ")


def test_one_torn_object_is_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": "abc')
    [(unread, origin)] = read_records(str(path))
    assert isinstance(unread, Unreadable)
    assert origin == f"{path}:1"


@pytest.mark.parametrize("rows", ['"open\nb\n', '"He said "hi" and\nleft\n"\nb\n'])
def test_a_malformed_csv_gives_no_record_after_the_fault(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text\na\n{rows}")
    with pytest.raises(ConfigError, match=r"a\.csv:3: malformed csv"):
        list(read_records(str(path)))


def test_a_pattern_of_folders_reads_each_file_once(tmp_path: Path) -> None:
    for number, place in enumerate(("", "a", "a/b")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "x.jsonl").write_text(f'{{"text": "{number}"}}\n')
    found = [record["text"] for record, _ in read_records(f"{tmp_path}/**")]
    assert sorted(found) == ["0", "1", "2"]


def test_an_empty_path_is_not_the_working_directory() -> None:
    with pytest.raises(ConfigError, match=r"data\.train, data\.eval, prompts: a path is empty"):
        list(read_records(""))


def test_a_folder_of_llamafactory_is_not_a_saved_data_set(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"use data=llamafactory data\.dataset_info="):
        list(read_records(str(tmp_path)))


def test_a_list_in_one_line_is_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Line(StringIO):
        def readline(self, _: object = -1) -> str:
            raise AssertionError("the line is as long as the file")

        __next__ = readline

    path = tmp_path / "a.json"
    path.write_text("content")
    monkeypatch.setattr(Reading, "open", lambda *_: Line('\n [{"text": "a"}]'))
    assert list(read_records(str(path))) == [({"text": "a"}, f"{path}:1")]


def test_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"/no/such/file\.json: no such file or folder"):
        read_records("/no/such/file.json")
    with pytest.raises(ConfigError, match=r"trl-lib/Capybara: no such .* use hub:trl-lib/Capybara\.$"):
        read_records("trl-lib/Capybara")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for path in ("data/train.jsonl", "here/foo.json.bz2", "./train", "../no_such_thing"):
        with pytest.raises(ConfigError, match=r"or prompts\.$"):
            read_records(path)
    with pytest.raises(ConfigError, match=r"prompts=~nobody-at-all/a\.json: there is no user"):
        read_records("~nobody-at-all/a.json")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # permission bits do not stop a test that runs as root
    with pytest.raises(ConfigError, match=r"a\.jsonl: cannot be read \(Permission denied\)"):
        list(read_records(str(path)))


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(ConfigError, match=r"holds no \.json, \.jsonl, \.csv, \.parquet, \.txt file"):
        list(read_records(str(tmp_path)))


@pytest.mark.parametrize("path", ["", "*.jsonl"])
def test_one_empty_file_of_several_is_named(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").touch()
    assert len(list(read_records(f"{tmp_path}/{path}"))) == len(RECORDS)
    assert caplog.messages == [f"{tmp_path}/b.jsonl: holds no record"]
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r": holds no record\. Give a file with at least one"):
        list(read_records(f"{tmp_path}/{path}"))


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: has two columns 'text'"):
        list(read_records(f"{tmp_path}/a.parquet"))


def test_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="holds the splits test, train"):
        list(read_records(str(tmp_path / "saved")))
    assert len(list(read_records(str(tmp_path / "saved" / "train")))) == 3


def test_torn_saved_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "saved")
    (path / "state.json").unlink()
    with pytest.raises(ConfigError, match="is not a readable saved dataset"):
        list(read_records(str(path)))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real files under {SHARED}")
@pytest.mark.parametrize(
    ("name", "count", "fields"),
    [
        ("alpaca_en_demo.json", 999, {"instruction", "input", "output"}),
        ("dpo_en_demo.json", 300, {"conversations", "chosen", "rejected"}),
        ("c4_demo.jsonl", 300, {"text"}),
        ("wiki_demo.txt", 30, {"text"}),
    ],
)
def test_real_file(name: str, count: int, fields: set[str]) -> None:
    records = list(read_records(str(SHARED / name)))
    assert len(records) == count
    assert all(fields <= record.keys() for record, _ in records)


@pytest.mark.parametrize("place", ["train.jsonl", "folder/train.jsonl", "folder/deeper/notes", "/dev/zero"])
def test_what_may_never_end_is_refused_before_it_is_read(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    (tmp_path / "folder" / "more.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / place
    if not path.exists():
        os.mkfifo(path)
    given = tmp_path / "folder" if path.is_relative_to(tmp_path / "folder") else path
    with pytest.raises(ConfigError, match=f"{path}: is a pipe, a device or a socket"):
        read_records(str(given))


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "txt", "folder", "dataset"])
def test_the_share_that_was_read(tmp_path: Path, kind: str) -> None:
    texts = [f"some text {n} " * 9 for n in range(4000)]
    path = tmp_path / f"a.{kind}"
    if kind == "json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif kind == "dataset":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        for part in range(4):
            (path / f"{part}.txt").write_text("".join(f"{text}\n" for text in texts[part * 1000 :][:1000]))
    else:
        lines = [json.dumps({"text": text}) for text in texts] if kind == "jsonl" else ["text", *texts]
        path.write_text("".join(f"{line}\n" for line in lines))
    records = read_records(str(path))
    shares = [records.reading.fraction() for _ in records]
    assert shares == sorted(shares)
    assert shares[2000] == pytest.approx(0.5, abs=0.02)
    assert records.reading.fraction() == pytest.approx(1.0)
