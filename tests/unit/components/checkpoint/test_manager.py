"""No save leaves an invalid state on disk at any moment, and the right checkpoints are kept after it."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from components.checkpoint import dcp, manager
from components.checkpoint.dcp import load_tensors, save_tensors
from components.checkpoint.folder import (
    best_checkpoint,
    complete_checkpoints,
    create_dir,
    is_complete,
    read_meta,
    remove,
    step_folder,
)
from components.checkpoint.manager import CheckpointManager
from components.checkpoint.resume import RunIdentity
from components.contracts.errors import TrainingError
from tests.patience import patience

IDENTITY = RunIdentity(
    model="abc", data="def", optimizer="adamw", reference=None, seed=1, global_batch_size=8
)
FILES = {"__0_0.distcp", ".metadata", "meta.json", "complete"}


@dataclass
class State:
    step: int
    num_tokens: int = 0
    best_step: int | None = None


class FakeEngine:
    """An engine with one tensor, whose elements are ``value``."""

    def __init__(self, value: float = 1.0) -> None:
        self.weight = torch.full((1000,), value)
        self.asked: list[bool] = []

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        self.asked.append(model_only)
        return {"model/weight": self.weight}

    def max_over_ranks(self, value: float) -> float:
        return value


def policy(run: Path, keep_last: int = 2, **options: Any) -> CheckpointManager:
    run.mkdir(exist_ok=True)
    options = {"model_only": False, "first_of_node": True} | options
    return CheckpointManager(run / "checkpoints", keep_last=keep_last, identity=IDENTITY, **options)


def save(
    p: CheckpointManager, *steps: int, engine: FakeEngine | None = None, best: int | None = None
) -> None:
    for step in steps:
        p.save(engine or FakeEngine(), State(step, 10 * step, best))  # type: ignore[arg-type]


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in complete_checkpoints(run / "checkpoints")]


def folders(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def saved_value(run: Path, step: int) -> float:
    tensors = {"model/weight": torch.zeros(1000)}
    load_tensors(step_folder(run / "checkpoints", step), tensors)
    assert tensors["model/weight"].unique().numel() == 1
    return tensors["model/weight"][0].item()


def refusing(monkeypatch: pytest.MonkeyPatch, *refused: int) -> None:
    """Let the disk fill up while the steps ``refused`` are written."""

    def full(path: Path, *args: Any) -> Any:
        assert list(path.iterdir()) == [], "nothing of an earlier save is left"
        files = save_tensors(path, *args)
        if path.name in {f"step_{step:08d}" for step in refused}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return files

    monkeypatch.setattr("components.checkpoint.manager.save_tensors", full)


def test_a_damaged_file_is_told_in_one_line(tmp_path: Path) -> None:
    save(policy(tmp_path), 7)
    path = step_folder(tmp_path / "checkpoints", 7) / "__0_0.distcp"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(TrainingError, match=r"checkpoint\.verify=true names a damaged file") as caught:
        saved_value(tmp_path, 7)
    assert len(str(caught.value).splitlines()) == 1


def test_a_save_is_whole_and_described(tmp_path: Path) -> None:
    engine = FakeEngine()
    save(policy(tmp_path), 7, engine=engine)
    path = tmp_path / "checkpoints" / "step_00000007"
    assert {file.name for file in path.iterdir()} == FILES
    meta = read_meta(path)
    assert meta.state == {"step": 7, "num_tokens": 70, "best_step": None}
    assert RunIdentity(**meta.identity) == IDENTITY
    assert not meta.model_only
    assert meta.files.keys() == FILES - {"meta.json", "complete"}
    assert engine.asked == [False]


def test_weights_alone_are_saved_as_such(tmp_path: Path) -> None:
    engine = FakeEngine()
    save(policy(tmp_path, model_only=True), 7, engine=engine)
    assert engine.asked == [True]
    assert read_meta(tmp_path / "checkpoints" / "step_00000007").model_only


def test_other_ranks_write_their_part_and_nothing_else(tmp_path: Path) -> None:
    path = step_folder(tmp_path / "checkpoints", 7)
    path.mkdir(parents=True)  # the first rank of the node creates it
    save(policy(tmp_path, first_of_node=False), 7)
    assert {file.name for file in path.iterdir()} == FILES - {"meta.json", "complete"}


def test_the_step_that_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    p, engine = policy(tmp_path), FakeEngine()
    save(p, 7, 7, engine=engine)
    resumed = policy(tmp_path, current=step_folder(tmp_path / "checkpoints", 7))
    save(resumed, 7, engine=engine)
    assert len(engine.asked) == 1
    save(policy(tmp_path), 7, engine=FakeEngine(2.0))
    assert saved_value(tmp_path, 7) == 2.0, "but one of another past is"


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    save(policy(tmp_path, keep_last), 1, 2, 3, 4)
    assert steps(tmp_path) == folders(tmp_path) == kept


def test_the_best_is_kept_until_a_better_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = policy(tmp_path, 1, keep_best=True, on_error="continue")
    save(p, 1)
    save(p, 2, best=2)
    save(p, 3, 4, best=2)
    assert steps(tmp_path) == [2, 4]
    refusing(monkeypatch, 5)
    save(p, 5, 6, best=5)
    assert steps(tmp_path) == [2, 6], "5 was never whole"
    save(p, 7, best=7)
    assert steps(tmp_path) == [7]
    save(policy(tmp_path, 1), 8, best=7)
    assert steps(tmp_path) == [8], "nobody asked for the best"


def test_the_best_may_be_evaluated_after_its_save(tmp_path: Path) -> None:
    p = policy(tmp_path, 1, keep_best=True)
    save(p, 1, best=1)
    save(p, 2, best=1)
    folder = tmp_path / "checkpoints"
    assert best_checkpoint(folder) == step_folder(folder, 1)
    p.update_state(State(3, 30, 3))
    assert best_checkpoint(folder) == step_folder(folder, 1), "the newest is not of this step"
    p.update_state(State(2, 20, 2))
    assert best_checkpoint(folder) == step_folder(folder, 2)
    save(p, 3, best=2)
    save(p, 4, best=2)
    assert steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("written", range(3))
def test_a_kill_while_the_state_is_updated_leaves_it_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The process is killed when this many of the three files are written."""
    p = policy(tmp_path)
    save(p, 2)
    files: list[Path] = []

    def write(path: Path, text: bytes) -> None:
        if len(files) == written:
            raise KeyboardInterrupt
        files.append(path)
        path.write_bytes(text)

    monkeypatch.setattr("components.checkpoint.folder.write_atomic", write)
    with pytest.raises(KeyboardInterrupt):
        p.update_state(State(2, 4711))
    found = read_meta(step_folder(tmp_path / "checkpoints", 2)).state["num_tokens"]
    assert found == (4711 if written == 2 else 20)


def test_a_failed_save_costs_no_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = policy(tmp_path, keep_last=1)
    refusing(monkeypatch, 2)
    save(p, 1)
    with pytest.raises(
        TrainingError, match=r"No space left on device \([\d,]+ MiB are free here\)"
    ) as caught:
        save(p, 2)
    assert "checkpoint.on_error=continue" in str(caught.value)
    assert steps(tmp_path) == folders(tmp_path) == [1]


def test_a_run_may_go_on_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = policy(tmp_path, on_error="continue")
    refusing(monkeypatch, 2)
    save(p, 1, 2, 3)
    assert steps(tmp_path) == folders(tmp_path) == [1, 3]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "No space left on device" in warning


def test_a_torn_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    torn = step_folder(tmp_path / "checkpoints", 2)
    torn.mkdir(parents=True)
    (torn / "leftover").touch()
    save(policy(tmp_path), 2)
    assert steps(tmp_path) == [2]
    assert {path.name for path in torn.iterdir()} == FILES


def test_a_stale_marker_never_marks_a_half_written_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of a step that a resumed run writes again is incomplete if the run is killed during it."""
    save(policy(tmp_path), 2)

    def killed(*_: object) -> None:
        assert not is_complete(step_folder(tmp_path / "checkpoints", 2))
        raise KeyboardInterrupt

    monkeypatch.setattr("components.checkpoint.manager.save_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        save(policy(tmp_path), 2)
    assert steps(tmp_path) == []


def test_only_torn_folders_behind_the_newest_whole_one_go(tmp_path: Path) -> None:
    for step in (1, 9):
        step_folder(tmp_path / "checkpoints", step).mkdir(parents=True)
    save(policy(tmp_path), 5)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step_00000005", "step_00000009"}


def test_pruning_unmarks_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = policy(tmp_path, keep_last=1)
    save(p, 1)

    def killed(path: Path, **_: object) -> None:
        assert not is_complete(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(p, 2)
    assert steps(tmp_path) == [2]


def test_no_node_removes_what_another_has_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two nodes with a shared disk begins only after the other one waits for it, or has created."""
    met, waiting, done = threading.Barrier(2), threading.Event(), []

    def gather(value: object, _group: object) -> list[object]:
        waiting.set()
        met.wait(patience(10))
        return [value]

    def recording(work: Callable[[Path], None], path: Path) -> None:
        if work is remove and threading.current_thread() is slow:
            assert waiting.wait(patience(10))
        work(path)
        done.append(work)
        if work is create_dir:
            waiting.set()

    for work in (remove, create_dir):
        monkeypatch.setattr(manager, work.__name__, partial(recording, work))
    monkeypatch.setattr(dcp, "all_gather_objects", gather)
    monkeypatch.setattr(manager, "save_tensors", lambda *_: {})
    for later in ("commit", "prune"):  # only rank 0 does them
        monkeypatch.setattr(manager, later, lambda *_, **__: None)
    slow = threading.Thread(target=save, args=(policy(tmp_path), 7))
    slow.start()
    save(policy(tmp_path), 7)
    slow.join()
    assert done == [remove, remove, create_dir, create_dir]


def test_several_nodes_remove_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node has removed a file that this one has listed."""
    save(policy(tmp_path), 7)
    unlink = os.unlink

    def too_late(name: str, **where: Any) -> None:
        unlink(name, **where)
        if where:  # rmtree gives the folder
            monkeypatch.setattr(os, "unlink", unlink)
            raise FileNotFoundError(name)

    path = step_folder(tmp_path / "checkpoints", 7)
    monkeypatch.setattr(os, "unlink", too_late)
    remove(path)
    assert not path.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a filesystem of 64 KiB."""
    target = tmp_path / "disk"
    target.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k tmpfs {target} 2>/dev/null"):
        pytest.skip("mounting a small tmpfs takes root")
    yield target
    os.system(f"umount {target}")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk(small_disk: Path, in_background: bool) -> None:
    p = policy(small_disk, 0, in_background=in_background)
    with pytest.raises(TrainingError, match="No space left on device"):  # noqa: PT012  one of them
        save(p, *range(1, 100))
        p.wait()
    whole = steps(small_disk)
    assert len(whole) >= 3
    assert folders(small_disk) == whole, "what was half written is gone"
    assert all(saved_value(small_disk, step) == 1.0 for step in whole)
