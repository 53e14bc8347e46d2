"""What a checkpoint's ``.metadata`` may hold: nothing in it is called."""

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from components.checkpoint import resolve_checkpoint
from components.checkpoint.dcp import load_tensors, save_tensors, saved_keys
from components.checkpoint.folder import CheckpointMeta, commit
from components.checkpoint.reader import StoredTensors
from components.checkpoint.resume import Resume, RunIdentity, newest_valid
from components.checkpoint.safe_reader import FILE, read_metadata
from components.contracts.errors import ConfigError, TrainingError

IDENTITY = RunIdentity("abc", "def", "adamw", None, seed=1, global_batch_size=8)


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def tensors() -> dict[str, torch.Tensor]:
    return {"model/a": torch.arange(6.0).view(2, 3), "optimizer_step": torch.tensor(3)}


def saved(folder: Path) -> Path:
    """A complete checkpoint of step 3."""
    point = folder / "checkpoints" / "step_00000003"
    point.mkdir(parents=True)
    files = save_tensors(point, tensors())
    files.pop(FILE)
    commit(point, CheckpointMeta({"step": 3}, asdict(IDENTITY), model_only=False, files=files))
    return point


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a call": (lambda mark: Calls(os.system, f"touch {mark}"), r"system, which no checkpoint"),
    "a call below a key": (
        lambda mark: Metadata({}, planner_data={"a": Calls(Path.touch, mark)}),
        r"builtins\.getattr|Path\.touch",
    ),
    "eval": (lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"), r"builtins\.eval"),
    "a function of torch": (lambda _: Calls(torch.load, "x"), r"torch\.serialization\.load"),
    "another pickle": (lambda _: Metadata({"model/a": BytesStorageMetadata()}), "BytesStorageMetadata"),
    "no metadata": (lambda _: {"model/a": 3}, "not the description"),
    "no tensor": (lambda _: Metadata({"model/a": 3}), "not a tensor"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_of_tensors_is_refused_before_it_is_called(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    mark, point = tmp_path / "ran", saved(tmp_path)
    (point / FILE).write_bytes(pickle.dumps(content(mark)))
    readers: tuple[Callable[[], object], ...] = (
        lambda: Resume(str(point)).resolve(tmp_path, "x", IDENTITY),
        lambda: resolve_checkpoint("checkpoint.init_from", str(tmp_path)),
        lambda: StoredTensors(point),
        lambda: load_tensors(point, tensors()),
        lambda: saved_keys(point),
    )
    for read in readers:
        with pytest.raises((ConfigError, TrainingError, pickle.UnpicklingError), match=message):
            read()
    assert newest_valid(tmp_path / "checkpoints") is None
    assert not mark.exists()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_torn_file_is_refused(tmp_path: Path, size: int) -> None:
    point = saved(tmp_path)
    (point / FILE).write_bytes((point / FILE).read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: .*\.metadata cannot be read"):
        Resume(str(point)).resolve(tmp_path, "x", IDENTITY)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    """In the form of every dtype, and as torch's own reader reads it."""
    kinds = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    numbers = {k for k in kinds if k.itemsize > 1 and k.is_floating_point and k != torch.bfloat16}
    every = {
        str(kind): torch.ones(2, dtype=kind) for kind in numbers | {torch.bool, torch.uint8, torch.int64}
    }
    save_tensors(tmp_path, every)
    assert read_metadata(tmp_path) == pickle.loads((tmp_path / FILE).read_bytes())
    found = {key: torch.zeros_like(value) for key, value in every.items()}
    load_tensors(tmp_path, found)
    assert all(found[key].equal(value) for key, value in every.items())
