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


FAULTS: dict[Callable[[Tensor, torch.device], Tensor], str] = {
    in_host_memory: "Expected all tensors to be on the same device",
    pageable: "copy to cuda at components/contracts/batch.py",
    in_int64: "cu_seq_q is torch.int64",
}
"""Replacements of ``to_device``, and a part of what the rehearsal says."""


def write_faulty_record(copy: Callable[..., Tensor], folder: Path, request: Json) -> None:
    with mock.patch("components.contracts.batch.to_device", copy):
        write_record(folder, request)


@pytest.mark.parametrize("copy", FAULTS, ids=lambda copy: copy.__name__)
def test_a_fault_is_found(
    copy: Callable[..., Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """KTO selects sequences of micro-batches, which are then no longer in pinned memory."""
    faulty = mock.patch("tests.rehearsal.rehearsed.write_record", partial(write_faulty_record, copy))
    with faulty, pytest.raises(AssertionError) as caught:
        check(rehearsed(tmp_path, "preflight.steps=1", *LITTLE, *BF16, "parallelism=single", "stage=kto"))
    assert FAULTS[copy] in f"{caught.value}{capfd.readouterr().err}"
