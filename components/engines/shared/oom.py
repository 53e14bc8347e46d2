"""Out-of-memory errors, whose messages describe the micro-batch or the step and contain a remedy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from components.contracts.batch import Batch
from components.contracts.errors import TrainingError

REMEDY = "lower run.micro_batch_size or data.max_length, or set parallelism.activation_checkpointing=full"
MESSAGES = (
    "not enough memory",
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""Parts of messages of an ordinary RuntimeError: of torch's allocators of host memory and of page-locked
memory, of cuBLAS, and of Triton."""


class MicrobatchOutOfMemory(TrainingError):
    """Error raised if a micro-batch runs out of memory; the message contains the micro-batch's number."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MESSAGES)


@contextmanager
def naming_microbatch(microbatches: Sequence[Batch]) -> Iterator[Callable[[int], None]]:
    """Name the micro-batch in out-of-memory errors of a pass over ``microbatches``.

    The caller calls the yielded function with the index of each micro-batch as it begins.

    Raises:
        MicrobatchOutOfMemory: if the pass runs out of memory, with the number of the last micro-batch begun.
    """
    at = 0

    def begin(number: int) -> None:
        nonlocal at
        at = number

    try:
        yield begin
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or isinstance(error, TrainingError):
            raise
        batch = microbatches[at]
        rows = len(batch.labels)
        raise MicrobatchOutOfMemory(
            f"out of memory in micro-batch {at + 1} of {len(microbatches)} "
            f"({rows} {'row' if rows == 1 else 'rows'}, "
            f"{batch.labels.numel()} tokens, longest {int(batch.seqlens.max())}): {REMEDY}"
        ) from error


@contextmanager
def naming_step(step: str, kind: type[TrainingError] = TrainingError) -> Iterator[None]:
    """Name ``step`` in out-of-memory errors, inside or outside of a micro-batch.

    Raises:
        TrainingError: of the class ``kind``, if the step runs out of memory.
    """
    try:
        yield
    except MicrobatchOutOfMemory as error:
        raise kind(f"{step}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or isinstance(error, TrainingError):
            raise
        raise kind(f"{step}: out of memory: {REMEDY}") from error
