"""What is on disk at every moment of a save, and what is kept after it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from components.checkpoint.folder import (
    RunIdentity,
    complete_checkpoints,
    is_complete,
    read_meta,
    step_folder,
)
from components.checkpoint.policy import CheckpointPolicy

IDENTITY = RunIdentity(
    model="abc", data="def", optimizer="adamw", reference=None, seed=1, global_batch_size=8
)


@dataclass
class State:
    step: int
    num_tokens: int = 0


class FakeEngine:
    """Writes one file; ``dies_at`` is the step whose save it does not survive."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at
        self.calls: list[str] = []

    def barrier(self) -> None:
        self.calls.append("barrier")

    def save(self, path: Path, *, model_only: bool = False) -> None:
        assert list(path.iterdir()) == [], "nothing of an earlier save is left"
        self.calls.append(f"save {path.name} model_only={model_only}")
        (path / "weights").write_text("whole")
        if path == step_folder(path.parent, self.dies_at or -1):
            raise OSError("no space left on device")


def policy(
    run: Path, keep_last: int = 2, *, model_only: bool = False, writes: bool = True
) -> CheckpointPolicy:
    return CheckpointPolicy(
        run / "checkpoints", keep_last=keep_last, model_only=model_only, writes=writes, identity=IDENTITY
    )


def save(p: CheckpointPolicy, *steps: int, engine: FakeEngine | None = None) -> None:
    for step in steps:
        p.save(engine or FakeEngine(), State(step, 10 * step))  # type: ignore[arg-type]


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in complete_checkpoints(run / "checkpoints")]


def folders(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def test_a_save_is_whole_and_described(tmp_path: Path) -> None:
    engine = FakeEngine()
    save(policy(tmp_path), 7, engine=engine)
    path = tmp_path / "checkpoints" / "step_00000007"
    assert {file.name for file in path.iterdir()} == {"weights", "meta.json", "complete"}
    meta = read_meta(path)
    assert meta.state == {"step": 7, "num_tokens": 70}
    assert RunIdentity(**meta.identity) == IDENTITY
    assert not meta.model_only
    # A barrier on either side: others neither write too early nor is the marker set too early.
    assert engine.calls == ["barrier", "save step_00000007 model_only=False", "barrier"]


def test_weights_alone_are_saved_as_such(tmp_path: Path) -> None:
    engine = FakeEngine()
    save(policy(tmp_path, model_only=True), 7, engine=engine)
    assert "save step_00000007 model_only=True" in engine.calls
    assert read_meta(tmp_path / "checkpoints" / "step_00000007").model_only


def test_other_ranks_write_their_part_and_nothing_else(tmp_path: Path) -> None:
    path = step_folder(tmp_path / "checkpoints", 7)
    path.mkdir(parents=True)  # by the rank that writes
    engine = FakeEngine()
    save(policy(tmp_path, writes=False), 7, engine=engine)
    assert [file.name for file in path.iterdir()] == ["weights"]
    assert engine.calls == ["barrier", "save step_00000007 model_only=False", "barrier"]


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    save(policy(tmp_path, keep_last), 1, 2, 3, 4)
    assert steps(tmp_path) == folders(tmp_path) == kept


def test_a_failed_save_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    p = policy(tmp_path, keep_last=1)
    save(p, 1)
    with pytest.raises(OSError, match="no space"):
        save(p, 2, engine=FakeEngine(dies_at=2))
    assert steps(tmp_path) == [1]
    assert folders(tmp_path) == [1, 2]


def test_a_torn_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    p = policy(tmp_path)
    with pytest.raises(OSError, match="no space"):
        save(p, 2, engine=FakeEngine(dies_at=2))
    (tmp_path / "checkpoints" / "step_00000002" / "leftover").touch()
    save(p, 2)
    assert steps(tmp_path) == [2]
    assert not (tmp_path / "checkpoints" / "step_00000002" / "leftover").exists()


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
        if not path.exists():
            return
        assert not is_complete(path)
        raise KeyboardInterrupt

    monkeypatch.setattr("components.checkpoint.policy.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(p, 2)
    assert steps(tmp_path) == [2]
