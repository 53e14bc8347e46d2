"""Any number of ranks writes and reads tensors, and the checksums of files are computed during writing."""

import dataclasses
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from components.checkpoint.dcp import load_tensors, save_tensors, saved_keys
from components.checkpoint.file_records import FileRecord, damage
from components.contracts.errors import TrainingError
from components.engines.shared.process_group import init_process_group
from tests.ranks import Ranks

SHAPES = {"model/embed.weight": (7, 4), "model/norm.weight": (3,), "exp_avg/embed.weight": (7, 4)}


def values(offset: float = 0.0) -> dict[str, Tensor]:
    """Return tensors with odd sizes, so that the shards of two ranks differ and one can be empty."""
    g = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=g) + offset for name, shape in SHAPES.items()}
    return made | {"model/scale.weight": torch.full((1,), 5.0 + offset)}


def sharded(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return every tensor sharded over all ranks, the optimizer step, and a tensor of this rank only."""
    init_process_group("cpu")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank = torch.distributed.get_rank()
    parts: dict[str, Tensor] = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in whole.items()}
    return parts | {"optimizer_step": torch.tensor([12.0]), f"rng/{rank}": torch.tensor([rank + 10])}


def save_on_ranks(path: Path) -> dict[str, FileRecord]:
    return save_tensors(path, sharded(values()))


def refused_on_one_rank(path: Path) -> str:
    """Save while a folder occupies the path of the first rank's file, and return this rank's error."""
    tensors = sharded(values())
    try:
        save_tensors(path, tensors)
    except OSError as error:
        return f"{type(error).__name__} {error.filename}"
    return "no error"


def load_on_ranks(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return every loaded tensor, gathered, and the value that only this rank has."""
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


def assert_measured(path: Path, files: dict[str, FileRecord]) -> None:
    contents = {file.name: file.read_bytes() for file in path.iterdir()}
    assert files == {
        name: FileRecord(len(data), xxhash.xxh3_64(data).hexdigest()) for name, data in contents.items()
    }


def test_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    step = {"optimizer_step": torch.tensor([12.0])}
    ranks = Ranks(2)
    first, second = ranks.run(save_on_ranks, tmp_path / "two")
    assert first == second
    assert first.keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert_measured(tmp_path / "two", first)
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
    (taken := tmp_path / "refused" / "__0_0.distcp").mkdir(parents=True)
    assert ranks.run(refused_on_one_rank, taken.parent) == [f"IsADirectoryError {taken}"] * 2


def test_another_shape_does_not_load(tmp_path: Path) -> None:
    save_tensors(tmp_path, values())
    with pytest.raises(TrainingError, match=r"(?i)size mismatch"):
        load_tensors(tmp_path, {"model/norm.weight": torch.zeros(4)})


def test_a_missing_tensor_does_not_load(tmp_path: Path) -> None:
    save_tensors(tmp_path, values())
    with pytest.raises(TrainingError, match=r"it has no momentum_buffer/norm.weight\); resume with the opt"):
        load_tensors(tmp_path, {"momentum_buffer/norm.weight": torch.zeros(3)})


def test_what_is_no_tensor_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="could not be written"):
        save_tensors(tmp_path, {"model/a": lambda: None})  # type: ignore[dict-item]


def test_sizes_are_compared_always_and_bytes_where_asked(tmp_path: Path) -> None:
    big = {"model/a": torch.arange(3 << 20, dtype=torch.float32)}  # spans many chunks
    files = save_tensors(tmp_path, big)
    assert_measured(tmp_path, files)
    assert damage(tmp_path, files, checksums=True) is None
    data = tmp_path / "__0_0.distcp"
    flipped = bytearray(data.read_bytes())
    flipped[6 << 20] ^= 1
    data.write_bytes(flipped)
    assert damage(tmp_path, files, checksums=False) is None
    assert "__0_0.distcp is damaged: its bytes" in str(damage(tmp_path, files, checksums=True))
    data.write_bytes(flipped[:-1])
    assert "__0_0.distcp is damaged: it has" in str(damage(tmp_path, files, checksums=False))
    data.unlink()
    assert "__0_0.distcp is missing" in str(damage(tmp_path, files, checksums=False))


def test_a_record_is_what_meta_json_holds() -> None:
    assert dataclasses.asdict(FileRecord(3, "5f")) == {"bytes": 3, "xxh3": "5f"}
