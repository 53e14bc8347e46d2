"""Ranges of a flattened tensor become boxes of the tensor, which together cover each element once."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from components.checkpoint.async_save import HostCopy
from components.checkpoint.dcp import load_tensors, save_tensors
from components.checkpoint.flat_shard import FlatChunk, FlatShard, flat_chunks

CUTS = {"one": (0, 35), "within a row": (0, 3, 5, 16, 35), "rows": (0, 14, 28, 35), "elements": range(36)}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_ranges_make_up_the_matrix(cuts: tuple[int, ...]) -> None:
    whole, made = torch.arange(35.0).view(5, 7), torch.full((5, 7), -1.0)
    for begin, end in pairwise(cuts):
        parts = list(flat_chunks(begin, end, 7, origin=(0, 0), start=0))
        assert len(parts) <= 3
        put(made, whole.flatten()[begin:end], parts)
    assert torch.equal(made, whole)


def put(made: Tensor, flat: Tensor, parts: list[FlatChunk]) -> None:
    for box in parts:
        place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True))
        value = flat[box.start : box.start + made[place].numel()].view(box.sizes)
        assert (made[place] == -1).all(), "written twice"
        made[place] = value


def test_a_vector_and_a_place_in_a_larger_tensor() -> None:
    assert list(flat_chunks(2, 6, 1, origin=(10,), start=4)) == [FlatChunk((12,), (4,), 4)]
    assert list(flat_chunks(6, 12, 4, origin=(10, 100), start=0)) == [
        FlatChunk((11, 102), (1, 2), 0),
        FlatChunk((12, 100), (1, 4), 2),
    ]


def test_it_is_written_from_where_it_lies_and_read_by_the_whole(tmp_path: Path) -> None:
    whole = torch.randn(6, 5)
    flat = torch.cat([torch.zeros(3), whole.flatten()])  # after other values in the same buffer
    shard = FlatShard.of(flat, whole.shape, list(flat_chunks(0, 30, 5, origin=(0, 0), start=3)))
    assert shard.data_ptr() == flat.data_ptr()
    copied = HostCopy().of({"model/a": shard})
    for name, tensors in {"plain": {"model/a": shard}, "copied": copied}.items():
        save_tensors(tmp_path / name, tensors)
        read = {"model/a": torch.zeros(6, 5)}
        load_tensors(tmp_path / name, read)
        assert torch.equal(read["model/a"], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_copied_to_be_written(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "clone", lambda _: pytest.fail("a copy"))
    matrix = torch.arange(12, dtype=dtype).view(4, 3)
    save_tensors(tmp_path, {"model/a": matrix[1:3], "model/scalar": matrix[3, 2]})
    read = {"model/a": torch.zeros(2, 3, dtype=dtype), "model/scalar": torch.zeros((), dtype=dtype)}
    load_tensors(tmp_path, read)
    assert torch.equal(read["model/a"], matrix[1:3])
    assert read["model/scalar"] == 11


def test_what_several_keys_share_is_copied_once() -> None:
    flat = torch.arange(6.0)
    both = {
        key: FlatShard.of(flat, torch.Size([3]), list(flat_chunks(0, 3, 1, origin=(0,), start=start)))
        for key, start in {"model/q": 0, "model/k": 3}.items()
    }
    copied = HostCopy().of(both)
    assert copied["model/q"].data_ptr() == copied["model/k"].data_ptr() != flat.data_ptr()
