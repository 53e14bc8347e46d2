"""Tensors that any number of ranks reads, and the checkpoint that run.resume means."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from components.checkpoint.folder import (
    META,
    CheckpointMeta,
    RunIdentity,
    commit,
    complete_checkpoints,
    read_meta,
    resume_point,
    step_folder,
)
from components.checkpoint.format import load_tensors, save_tensors, saved_keys
from runner.errors import ConfigError, TrainingError
from tests.ranks import Ranks

IDENTITY = RunIdentity(
    model="abc", data="def", optimizer="adamw", reference=None, seed=1, global_batch_size=8
)
SHAPES = {"model/embed.weight": (7, 4), "model/norm.weight": (3,), "exp_avg/embed.weight": (7, 4)}


def values(offset: float = 0.0) -> dict[str, Tensor]:
    """Odd sizes on purpose: shards of two ranks differ, and one may be empty."""
    g = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=g) + offset for name, shape in SHAPES.items()}
    return made | {"model/scale.weight": torch.full((1,), 5.0 + offset)}


def sharded(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor over all ranks, and what only this rank has."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank = torch.distributed.get_rank()
    parts: dict[str, Tensor] = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in whole.items()}
    return parts | {"optimizer_step": torch.tensor([12.0]), f"rng/{rank}": torch.tensor([rank + 10])}


def save_on_ranks(path: Path) -> None:
    save_tensors(path, sharded(values()))


def load_on_ranks(path: Path) -> tuple[dict[str, Tensor], int]:
    """Every tensor gathered, and this rank's own."""
    state = sharded({name: torch.zeros_like(value) for name, value in values().items()})
    mine = f"rng/{torch.distributed.get_rank()}"
    known = {name: tensor.zero_() for name, tensor in state.items() if name in saved_keys(path)}
    load_tensors(path, known)
    gathered = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in known.items() if k != mine}
    return gathered, int(state[mine][0])


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    step = {"optimizer_step": torch.tensor([12.0])}
    with Ranks(2) as ranks:
        ranks.run(save_on_ranks, tmp_path / "two")
        assert saved_keys(tmp_path / "two") == {*values(), "optimizer_step", "rng/0", "rng/1"}
        alone = {name: torch.zeros_like(value) for name, value in (values() | step).items()}
        addresses = {name: value.data_ptr() for name, value in alone.items()}
        load_tensors(tmp_path / "two", alone)
        assert_equal(alone, values() | step)
        assert addresses == {name: value.data_ptr() for name, value in alone.items()}, "filled in place"
        save_tensors(tmp_path / "one", alone | {"rng/0": torch.tensor([77])})
        for rank, (tensors, own) in enumerate(ranks.run(load_on_ranks, tmp_path / "two")):
            assert_equal(tensors, values() | step)
            assert own == rank + 10
        for rank, (tensors, own) in enumerate(ranks.run(load_on_ranks, tmp_path / "one")):
            assert_equal(tensors, values() | step)
            assert own == (77 if rank == 0 else rank + 10), "a rank without a twin keeps its own"


def test_another_shape_does_not_load(tmp_path: Path) -> None:
    save_tensors(tmp_path, values())
    with pytest.raises(TrainingError, match=r"(?i)size mismatch"):
        load_tensors(tmp_path, {"model/norm.weight": torch.zeros(4)})


def test_a_missing_tensor_does_not_load(tmp_path: Path) -> None:
    save_tensors(tmp_path, values())
    with pytest.raises(TrainingError, match="momentum_buffer"):
        load_tensors(tmp_path, {"momentum_buffer/norm.weight": torch.zeros(3)})


def make_run(
    folder: Path, complete: tuple[int, ...] = (), torn: tuple[int, ...] = (), *, model_only: bool = False
) -> Path:
    for step in complete + torn:
        path = step_folder(folder / "checkpoints", step)
        path.mkdir(parents=True)
        if step in complete:
            commit(path, CheckpointMeta({"step": step}, asdict(IDENTITY), model_only))
    return folder


def point(run: Path, step: int) -> Path:
    return step_folder(run / "checkpoints", step)


def resume(path: Path, identity: RunIdentity = IDENTITY) -> Path | None:
    return resume_point(str(path), Path("absent"), "absent", identity)


def test_meta_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = CheckpointMeta({"step": 3, "num_tokens": 99}, asdict(IDENTITY), model_only=False)
    commit(tmp_path, meta)
    assert read_meta(tmp_path) == meta
    assert {path.name for path in tmp_path.iterdir()} == {META, "complete"}


def test_a_crash_before_the_marker_is_in_place_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path, complete=(5,))
    assert complete_checkpoints(tmp_path / "checkpoints") == []


def test_a_run_folder_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, complete=(20, 5, 100), torn=(300,))
    assert [p.name for p in complete_checkpoints(run / "checkpoints")] == [
        "step_00000005",
        "step_00000020",
        "step_00000100",
    ]
    assert resume(run) == point(run, 100)
    assert resume(point(run, 5)) == point(run, 5)


REFUSED: dict[str, Callable[[Path], Path]] = {
    "never completed": lambda root: point(make_run(root, (5,), (6,)), 6),
    "holds no complete checkpoint": lambda root: make_run(root, torn=(6,)),
    "is not a folder": lambda root: root / "absent",
    "save_model_only": lambda root: make_run(root, (5,), model_only=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.resume: .*{message}"):
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
    assert resume_point("auto", tmp_path, "name", IDENTITY) == newest
    assert resume_point("auto", tmp_path, "absent", IDENTITY) is None
    assert resume_point("never", tmp_path, "name", IDENTITY) is None


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
    with pytest.raises(ConfigError, match=rf"^run\.resume: .*{message}") as caught:
        resume_point("auto" if how == "auto" else str(run), tmp_path, "name", replace(IDENTITY, **change))
    assert len(str(caught.value).splitlines()) <= 2
