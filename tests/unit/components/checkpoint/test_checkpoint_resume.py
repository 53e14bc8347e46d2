"""checkpoint.resume finds the right checkpoint, and refuses unsuitable runs and folders."""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from components.checkpoint.file_records import FileRecord
from components.checkpoint.folder import (
    MARKER,
    META,
    CheckpointMeta,
    commit,
    complete_checkpoints,
    read_meta,
    step_folder,
)
from components.checkpoint.resume import FORCED, REMEDIES, Resume, RunIdentity
from components.contracts.errors import ConfigError

IDENTITY = RunIdentity(
    model="abc", data="def", optimizer="adamw", reference=None, seed=1, global_batch_size=8
)
CONTENT = b"whole"
FILES = {"data": FileRecord(5, "d35c10d541c3c98b")}


def make_run(
    folder: Path,
    complete: tuple[int, ...] = (),
    torn: tuple[int, ...] = (),
    *,
    model_only: bool = False,
    identity: RunIdentity = IDENTITY,
) -> Path:
    for step in complete + torn:
        path = step_folder(folder / "checkpoints", step)
        path.mkdir(parents=True)
        (path / "data").write_bytes(CONTENT)
        if step in complete:
            commit(path, CheckpointMeta({"step": step}, asdict(identity), model_only, FILES))
    return folder


def point(run: Path, step: int) -> Path:
    return step_folder(run / "checkpoints", step)


def resume(path: Path, identity: RunIdentity = IDENTITY, **options: bool) -> Path | None:
    return Resume(str(path), **options).resolve(Path("absent"), "absent", identity)


def test_meta_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = CheckpointMeta({"step": 3, "num_tokens": 99}, asdict(IDENTITY), model_only=False, files=FILES)
    commit(tmp_path, meta)
    assert read_meta(tmp_path) == meta
    assert {path.name for path in tmp_path.iterdir()} == {META, MARKER}


def test_a_crash_before_the_marker_is_in_place_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[str] = []

    def crash(path: Path, target: Path) -> None:
        replaced.append(target.name)
        if target.name == MARKER:
            raise KeyboardInterrupt
        path.rename(target)

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path, complete=(5,))
    assert complete_checkpoints(tmp_path / "checkpoints") == []
    assert replaced == [META, MARKER], "the marker is the last"


def test_a_run_folder_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, complete=(20, 5, 100), torn=(300,))
    assert [p.name for p in complete_checkpoints(run / "checkpoints")] == [
        "step_00000005",
        "step_00000020",
        "step_00000100",
    ]
    assert resume(run, verify=True) == point(run, 100)
    assert resume(point(run, 5)) == point(run, 5)


REFUSED: dict[str, Callable[[Path], Path]] = {
    "never completed": lambda root: point(make_run(root, (5,), (6,)), 6),
    "holds no complete checkpoint": lambda root: make_run(root, torn=(6,)),
    "is not a folder": lambda root: root / "absent",
    "model_only": lambda root: make_run(root, (5,), model_only=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoint\.resume: .*{message}"):
        resume(REFUSED[message](tmp_path))


def test_auto_takes_the_newest_run_that_holds_a_checkpoint(tmp_path: Path) -> None:
    for stamp, complete in [
        ("2026-01-02_10-00-00", (9,)),
        ("2026-01-02_10-00-00__2", (3,)),
        ("2026-01-02_10-00-00__10", (4,)),
        ("2026-01-03_00-00-00", ()),
    ]:
        make_run(tmp_path / "name" / stamp, complete, torn=(1,))
    make_run(tmp_path / "other" / "2027-01-01_00-00-00", (5,))
    newest = point(tmp_path / "name" / "2026-01-02_10-00-00__10", 4)
    assert Resume("auto").resolve(tmp_path, "name", IDENTITY) == newest
    assert Resume("auto").resolve(tmp_path, "absent", IDENTITY) is None
    assert Resume("never").resolve(tmp_path, "name", IDENTITY) is None
    older = point(tmp_path / "name" / "2026-01-02_10-00-00__2", 3)
    assert Resume("auto").resolve(tmp_path, "name", IDENTITY, lambda run: run.name.endswith("__2")) == older


def test_a_copy_of_a_run_is_not_the_newest(tmp_path: Path) -> None:
    for name in ("2026-01-02_10-00-00", "2026-01-02_10-00-00_backup", "best"):
        make_run(tmp_path / "step_size" / name, (5,))
    assert resume(tmp_path / "step_size") == point(tmp_path / "step_size" / "2026-01-02_10-00-00", 5)
    assert resume(tmp_path / "step_size" / "best") == point(tmp_path / "step_size" / "best", 5)


def test_a_damaged_checkpoint_with_a_name_of_the_users_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, (5, 10))
    for name in ("step_00000010_copy", "best"):
        renamed = point(run, 10).with_name(name)
        shutil.copytree(point(run, 10), renamed)
        truncate(renamed)
        offer = point(run, 5 if "step" in name else 10)
        with pytest.raises(ConfigError, match=f"it has 4 bytes.*; take checkpoint.resume={offer}"):
            resume(renamed)


def truncate(folder: Path) -> None:
    (folder / "data").write_bytes(CONTENT[:-1])


def flip(folder: Path) -> None:
    (folder / "data").write_bytes(b"whale")


def lose(folder: Path) -> None:
    (folder / "data").unlink()


def another_meta(folder: Path) -> None:
    text = (folder / META).read_text()
    (folder / META).write_text(text.replace('"seed": 1', '"seed": 3'))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "data is damaged: it has 4 bytes, and 5 were written": truncate,
    "data is damaged: its bytes": flip,
    "data is missing": lose,
    "meta.json is damaged": another_meta,
}


@pytest.mark.parametrize("how", ["auto", "run folder", "checkpoint"])
@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_one_is_refused_and_the_one_before_offered(tmp_path: Path, message: str, how: str) -> None:
    run = make_run(tmp_path / "name" / "2026-01-02_10-00-00", (5, 10, 15))
    for step in (10, 15):
        DAMAGES[message](point(run, step))
    asked = {"auto": "auto", "run folder": str(run), "checkpoint": str(point(run, 15))}[how]
    offer = re.escape(str(point(run, 5)))
    with pytest.raises(ConfigError, match=rf"step_00000015: {message}.*; take checkpoint\.resume={offer}\."):
        Resume(asked, verify=True).resolve(tmp_path, "name", IDENTITY)
    DAMAGES[message](point(run, 5))
    with pytest.raises(ConfigError, match="no earlier checkpoint of its run is intact"):
        Resume(asked, verify=True).resolve(tmp_path, "name", IDENTITY)


def test_a_flipped_byte_is_looked_for_where_asked_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, (5,))
    flip(point(run, 5))
    assert resume(run) == point(run, 5)


def test_a_marker_vouches_for_its_own_meta_alone(tmp_path: Path) -> None:
    """A marker of an earlier save of this step does not mark the files that were written later."""
    run = make_run(tmp_path, (5,))
    stale = (point(run, 5) / MARKER).read_bytes()
    commit(point(run, 5), CheckpointMeta({"step": 5, "skipped": 1}, asdict(IDENTITY), False, FILES))
    (point(run, 5) / MARKER).write_bytes(stale)
    with pytest.raises(ConfigError, match=r"meta\.json is damaged"):
        resume(run)


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"model": "xyz"}, "another model"),
    ({"seed": 2}, r"run\.seed=1"),
    ({"global_batch_size": 16}, r"run\.global_batch_size=8"),
    ({"data": "uvw"}, "data"),
]


@pytest.mark.parametrize(("change", "message"), CHANGED)
@pytest.mark.parametrize("how", ["auto", "path"])
def test_another_run_is_refused(tmp_path: Path, how: str, change: dict[str, Any], message: str) -> None:
    run = make_run(tmp_path / "name" / "2026-01-02_10-00-00", (5,))
    asked = Resume("auto" if how == "auto" else str(run))
    with pytest.raises(ConfigError, match=rf"^checkpoint\.resume: .*{message}") as caught:
        asked.resolve(tmp_path, "name", replace(IDENTITY, **change))
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("key", REMEDIES)
def test_data_seed_and_batch_size_can_be_forced(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = make_run(tmp_path, (5,)), replace(IDENTITY, **{key: 99})
    if key not in FORCED:
        with pytest.raises(ConfigError) as caught:
            resume(run, other, force=True)
        assert "allow_mismatch" not in str(caught.value)
        return
    with pytest.raises(ConfigError, match=r"checkpoint\.allow_mismatch=true"):
        resume(run, other)
    with caplog.at_level(logging.WARNING, logger="components"):
        assert resume(run, other, force=True) == point(run, 5)
    assert f"checkpoint.allow_mismatch: {key} of" in caplog.text


@pytest.mark.parametrize(
    ("written", "asked", "same"),
    [
        (("path=base", "x"), ("path=/dir/base", "x"), True),
        (("path=base", "x"), ("path=base", "y"), False),
        (("path=base", "x"), (None, None), False),
        ((None, None), ("path=base", "x"), False),
        (("path=base", None), ("path=base", "x"), True),  # written by an earlier version
        (("path=base", None), ("path=other", "x"), False),
    ],
)
def test_a_reference_is_compared_by_its_weights(
    tmp_path: Path, written: tuple[str | None, ...], asked: tuple[str | None, ...], same: bool
) -> None:
    stored, ours = (replace(IDENTITY, reference=name, reference_content=of) for name, of in (written, asked))
    run = make_run(tmp_path, (5,), identity=stored)
    if same:
        assert resume(run, ours) == point(run, 5)
    else:
        with pytest.raises(ConfigError, match=r"path=base; set|had no reference"):
            resume(run, ours)
    assert resume(run, replace(ours, reference=None, reference_content=None), evaluates=True)


def test_the_docs_list_what_may_not_change() -> None:
    """Every field of a run's identity has a row, which shows whether the field can be forced."""
    page = (Path(__file__).parents[4] / "docs" / "runs.md").read_text()
    table = page.partition("| what a resumed run keeps |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([a-z_]+): .* \| (.*) \|$", table, re.MULTILINE))
    names = {field.name for field in fields(RunIdentity)} - {"reference_content"}  # of the row "reference"
    assert rows.keys() == names == REMEDIES.keys()
    assert {key for key, forced in rows.items() if forced == "`checkpoint.allow_mismatch=true`"} == set(
        FORCED
    )
