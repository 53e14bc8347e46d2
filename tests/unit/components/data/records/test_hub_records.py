"""``hub:NAME``: data sets that the ``datasets`` library loads. A folder stands in for the hub."""

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError
from components.data import FilesData
from components.data.data_sources import HubSource
from components.data.records.hub_records import HubDataset, current_commit
from components.data.records.record_files import read_records

CONFIG = "components.data.config"
SHARD = BatchShard(1, 1)


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = tmp_path / "repo"
    folder.mkdir()
    for split, count in (("train", 10), ("test", 3)):
        rows = (json.dumps({"text": f"{split} {n}"}) + "\n" for n in range(count))
        (folder / f"{split}.jsonl").write_text("".join(rows))
    return str(folder)


def texts(data: HubDataset) -> list[str]:
    return [record["text"] for record, _ in data.records() if isinstance(record, dict)]


def test_a_split_and_a_part_of_one(repo: str) -> None:
    train = HubDataset("data.train", repo)
    assert texts(train) == [f"train {n}" for n in range(10)]
    assert [origin for _, origin in train.records()][:2] == [f"hub:{repo}:1", f"hub:{repo}:2"]
    part = HubDataset("data.train", repo, split="train[:30%]")
    assert texts(part) == [f"train {n}" for n in range(3)]
    assert part.fingerprint() == HubDataset("data.train", repo, split="train[:30%]").fingerprint()
    assert part.fingerprint() != train.fingerprint()


def test_the_options_of_files(repo: str) -> None:
    data = FilesData(train=f"hub:{repo}", split="train[:50%]", eval_split="test", max_samples=2)
    [(source, _)] = data.train_sources()
    assert isinstance(source, HubSource)
    assert [record for record, _ in source.items("text").items] == [{"text": "train 0"}, {"text": "train 1"}]
    evaluation = data.eval_sources()["eval"]
    assert isinstance(evaluation, HubSource)
    assert texts(evaluation.dataset) == ["test 0", "test 1", "test 2"]
    assert evaluation.name == f"data.eval=hub:{repo} (test)"


def test_each_source_may_have_a_part_of_its_own(repo: str, tmp_path: Path) -> None:
    path, own = f"hub:{repo}", {"split": "test", "subset": "b", "revision": "v2"}
    data = FilesData(sources=[{"path": path, "split": "test"}, {"path": path}], split="train[:20%]")
    found = [source for source, _ in data.train_sources()]
    texts = [[record for record, _ in source.items("text").items] for source in found]
    assert texts == [[{"text": f"test {n}"} for n in range(3)], [{"text": f"train {n}"} for n in range(2)]]
    assert found[0].content(tmp_path) != found[1].content(tmp_path)
    data = FilesData(sources=[{"path": path, **own}, {"path": path}], subset="a", revision="v1")
    assert [source.dataset for source, _ in data.train_sources() if isinstance(source, HubSource)] == [
        HubDataset("data.sources[0]", repo, "b", "test", "v2"),
        HubDataset("data.sources[1]", repo, "a", "train", "v1"),
    ]


def test_a_data_set_that_is_read_while_training(repo: str) -> None:
    data = FilesData(train=f"hub:{repo}", streaming=True, buffer_size=4)
    [streamed] = data.streamed_sources()
    assert isinstance(streamed, HubSource)
    records = [record for record, _ in streamed.items("text").items]
    assert records == [{"text": f"train {n}"} for n in range(10)]
    [(first, _)] = data.train_sources()
    assert [record for record, _ in first.items("text").items] == records[:4]
    assert not list(Path(repo).parent.rglob("*.arrow"))  # no copy is made


def test_a_stream_reads_the_commit_of_its_preparation(
    repo: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, when the branch names another commit."""
    hub = SimpleNamespace(sha="first")
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: hub)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    current_commit.cache_clear()
    for name in ("load_dataset", "load_dataset_builder"):
        load = getattr(datasets, name)
        monkeypatch.setattr(datasets, name, lambda _repo, *_, _load=load, **options: _load(repo, **options))
    data = FilesData(train="hub:user/texts", streaming=True, buffer_size=4, cache_dir=str(tmp_path))
    found = data.prepare("text", tokenizer, seed=3, global_batch_size=1, max_steps=2, epochs=None)
    hub.sha = "second"
    current_commit.cache_clear()
    with mock.patch(f"{CONFIG}.Producer") as producer, mock.patch(f"{CONFIG}.StreamLoader"):
        place = {"step": 0, "position": (), "main": True, "beat": str}
        data.open_stream(json.loads(json.dumps(found.to_json())), SHARD, "text", tokenizer, tmp_path, **place)
    [source] = producer.call_args.args[0].sources
    assert source.dataset == HubDataset("data.train", "user/texts", revision="first")


def test_a_stream_without_network_reads_what_the_cache_holds(
    repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert HubDataset("data.train", "user/texts").commit() is None
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", mock.Mock(side_effect=HFValidationError("no name")))
    current_commit.cache_clear()
    assert HubDataset("data.train", repo).commit() is None
    with pytest.raises(ConfigError, match=r"data\.train: the hub names no commit of hub:user/texts"):
        HubDataset("data.train", "user/texts").commit()


@pytest.mark.parametrize(("split", "streamed"), [("test", True), ("test[:50%]", False)])
def test_the_evaluation_split_of_a_stream_is_not_downloaded(repo: str, split: str, streamed: bool) -> None:
    data = FilesData(train=f"hub:{repo}", streaming=True, eval_split=split, max_eval_samples=1)
    records = [record for record, _ in data.eval_sources()["eval"].items("text").items]
    assert records == [{"text": "test 0"}]
    assert bool(list(Path(repo).parent.rglob("*.arrow"))) != streamed


def test_a_stream_without_a_record(repo: str) -> None:
    table = datasets.Dataset.from_dict({"text": []}, datasets.Features({"text": datasets.Value("string")}))
    table.to_parquet(f"{repo}/none/train.parquet")
    dataset = HubDataset("data.train", repo, folder="none")
    with pytest.raises(ConfigError, match=r"data\.train=hub:.*: holds no record"):
        HubSource(option="data.train", dataset=dataset, streaming=True).items("text")


def test_the_identity_of_a_stream_of_a_data_set_follows_a_change(repo: str, tmp_path: Path) -> None:
    [source] = FilesData(train=f"hub:{repo}", streaming=True).streamed_sources()
    before = source.content(tmp_path)
    assert source.content(tmp_path) == before
    train = Path(repo) / "train.jsonl"
    train.write_text(train.read_text() + train.read_text())
    assert source.content(tmp_path) != before


def test_the_identity_of_a_stream_of_a_folder_is_not_its_place_or_time(repo: str, tmp_path: Path) -> None:
    def stream(path: str) -> tuple[list[str], list[str]]:
        [source] = FilesData(train=f"hub:{path}", streaming=True).streamed_sources()
        return source.content(tmp_path), source.version()

    content, version = stream(repo)
    moved = stream(shutil.copytree(repo, f"{repo}-moved"))
    assert moved[0] == content
    assert moved[1] != version  # the cache is not that of another folder
    os.utime(Path(repo) / "train.jsonl", (0, 0))
    assert stream(repo)[0] == content
    assert stream(repo)[1] != version


@pytest.mark.parametrize("streaming", [False, True])
def test_images_are_not_decoded(repo: str, streaming: bool) -> None:
    image = {"bytes": b"not an image", "path": None}
    features = datasets.Features(
        {"text": datasets.Value("string"), "images": datasets.List({"image": datasets.Image()})}
    )
    table = datasets.Dataset.from_list([{"text": "a", "images": [{"image": image}]}], features=features)
    table.to_parquet(f"{repo}/images/train.parquet")
    table.save_to_disk(f"{repo}/saved")
    expected = [{"text": "a", "images": [{"image": {"bytes": image["bytes"]}}]}]
    records = HubDataset("data.train", repo, folder="images").records(streaming=streaming)
    assert [record for record, _ in records] == expected
    assert [record for record, _ in read_records(f"{repo}/saved")] == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split": "dev"}, "Unknown split"),
        ({"split": "train[:0]"}, "corresponds to no data"),
        ({"subset": "german"}, "cannot be loaded"),
    ],
)
def test_what_a_data_set_does_not_have(repo: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        texts(HubDataset("data.train", repo, **more))
    assert str(caught.value).startswith("data.train: hub:")
    assert len(str(caught.value).splitlines()) <= 2


class Torn:
    """An ``IterableDataset`` whose second row cannot be read."""

    features = None

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise EOFError("Compressed file ended")


def test_a_torn_file_is_named_with_the_last_row(monkeypatch: pytest.MonkeyPatch, repo: str) -> None:
    (Path(repo) / "train.jsonl").unlink()
    (Path(repo) / "train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(ConfigError, match=r"data\.train: hub:.* cannot be loaded \(Compressed file ended"):
        HubDataset("data.train", repo).records(streaming=True)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Torn())
    records = HubDataset("data.train", repo).records(streaming=True)
    with pytest.raises(ConfigError, match=r"data\.train: hub:.* after row 1 \(Compressed file ended\)"):
        list(records)


def test_the_split_of_the_training_data_is_not_that_of_another_data_set(repo: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.eval_split: data\.split is that of the training data; name"
    ):
        FilesData(train=f"hub:{repo}", split="train[:50%]", eval=f"hub:{repo}")
    sources = [{"path": "a.jsonl"}, {"path": f"hub:{repo}", "split": "train[:50%]"}]
    with pytest.raises(ConfigError, match=r"data\.eval_split: data\.sources\[1\]\.split is that of"):
        FilesData(sources=sources, eval=f"hub:{repo}")
    FilesData(sources=sources, eval=f"hub:{repo}", eval_split="test")


def test_a_folder_and_a_subset_of_a_data_set(repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("code", "prose"):
        (Path(repo) / name).mkdir()
        (Path(repo) / name / "train.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert texts(HubDataset("data.train", repo, folder="code")) == ["code"]
    subset = "configs:\n- {config_name: prose, data_files: prose/train.jsonl}\n"
    (Path(repo) / "README.md").write_text(f"---\n{subset}---\n")
    assert texts(HubDataset("data.train", repo, "prose")) == ["prose"]
    asked: dict[str, Any] = {}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **options: asked.update(options))
    monkeypatch.setattr("components.data.records.hub_records.current_commit", lambda *_: None)
    HubDataset("data.train", "team/data", revision="v2").records()
    assert asked["revision"] == "v2"
    with pytest.raises(ConfigError, match=r"data\.revision: data\.train=hub:.* is local .*; leave it out"):
        HubDataset("data.train", repo, revision="v2").fingerprint()


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_route(*_: object, **__: object) -> None:
        asked.append(1)
        raise ConnectionError("no route")

    asked: list[int] = []
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_route)
    current_commit.cache_clear()
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"data\.train: hub:nobody/nothing cannot be loaded \(.*\)\.\nCheck"
        ):
            HubDataset("data.train", "nobody/nothing").fingerprint()
    assert asked == [1]
    assert "Retrying" not in caplog.text


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.train: hub:nobody/nothing cannot be loaded .*\nCheck"):
        HubDataset("data.train", "nobody/nothing").fingerprint()


@pytest.mark.parametrize("name", ["split", "subset", "revision"])
def test_files_have_no_parts(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{name}: only data sets of the hub have one; use"):
        FilesData(train="a.jsonl", **{name: "x"})
    with pytest.raises(
        ConfigError, match=rf"data\.sources\[0\]\.{name}: only data sets of the hub have one; use"
    ):
        FilesData(sources=[{"path": "a.jsonl", name: "x"}])


@pytest.mark.parametrize("data", [{"train": "a.jsonl"}, {"sources": [{"path": "hub:a/b"}]}])
def test_a_split_of_no_data_set(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_split: is a split of data\.eval, else of data\.train"):
        FilesData(**data, eval_split="test")
