"""The messages of out-of-memory errors name the step, the micro-batch and the remedy."""

import pytest
import torch

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import TrainingError
from components.engines.shared.oom import naming_microbatch, naming_step


def batch(rows: int, length: int, *seqlens: int) -> Batch:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(ids, torch.full_like(ids, IGNORE), ids, torch.tensor(seqlens, dtype=torch.int32))


BATCHES = [batch(2, 10, 10, 3), batch(2, 8, 5, 8), batch(1, 4, 4)]


def fail_in(number: int, error: BaseException) -> None:
    with naming_step("step 12"), naming_microbatch(BATCHES) as begin:
        for index in range(number + 1):
            begin(index)
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_the_micro_batch_and_the_remedy(error: BaseException) -> None:
    with pytest.raises(TrainingError) as raised:
        fail_in(1, error)
    assert str(raised.value) == (
        "step 12: out of memory in micro-batch 2 of 3 (2 rows, 16 tokens, longest 8): lower "
        "run.micro_batch_size or data.max_length, or set parallelism.activation_checkpointing=full"
    )
    assert raised.value.__cause__.__cause__ is error  # type: ignore[union-attr]


def test_memory_that_ends_elsewhere_in_the_step() -> None:
    words = r"^step 12: out of memory: lower run\.micro_batch_size"
    with pytest.raises(TrainingError, match=words), naming_step("step 12"):
        raise MemoryError


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), TrainingError("x"), ValueError("y")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        fail_in(0, error)
    assert raised.value is error


def test_torch_speaks_as_expected_where_host_memory_ends() -> None:
    words = "out of memory in micro-batch 1 of 3"
    with pytest.raises(TrainingError, match=words), naming_microbatch(BATCHES):
        torch.empty(2**60, dtype=torch.uint8)
