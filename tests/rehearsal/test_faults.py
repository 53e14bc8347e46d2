"""Rehearsals of micro-batches that are copied to the GPU in a wrong way."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from components.contracts.device_copy import to_device
from components.contracts.json_types import Json
from tests.rehearsal.rehearsed import rehearsed, write_record
from tests.rehearsal.test_layouts import BF16, LITTLE, check


def in_host_memory(tensor: Tensor, _: torch.device) -> Tensor:
    return tensor


def pageable(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


def in_int64(tensor: Tensor, device: torch.device) -> Tensor:
    return to_device(tensor.long(), device)


BATCH, ROW = "components.contracts.batch", "components.engines.megatron.runtime.cp_sharding"
KTO, CP2 = ["parallelism=single", "stage=kto"], ["parallelism=cp2"]
FAULTS: dict[str, tuple[str, Callable[[Tensor, torch.device], Tensor], list[str], str]] = {
    "in_host_memory": (BATCH, in_host_memory, KTO, "Expected all tensors to be on the same device"),
    "pageable": (BATCH, pageable, KTO, "copy to cuda at components/contracts/batch.py"),
    "in_int64": (BATCH, in_int64, KTO, "cu_seq_q is torch.int64"),
    "pageable on megatron": (ROW, pageable, CP2, "copy to cuda at components/engines/megatron/runtime/cp_sh"),
}
"""Module, replacement of its ``to_device``, layout and stage, and a part of what the rehearsal says."""


def write_faulty_record(module: str, copy: Callable[..., Tensor], folder: Path, request: Json) -> None:
    with mock.patch(f"{module}.to_device", copy):
        write_record(folder, request)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """KTO selects sequences of micro-batches, which are then no longer in pinned memory."""
    module, copy, words, said = FAULTS[name]
    faulty = mock.patch("tests.rehearsal.rehearsed.write_record", partial(write_faulty_record, module, copy))
    with faulty, pytest.raises(AssertionError) as caught:
        check(rehearsed(tmp_path, "preflight.steps=1", *LITTLE, *BF16, *words))
    assert said in f"{caught.value}{capfd.readouterr().err}"
