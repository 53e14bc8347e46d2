"""Out of memory: which micro-batch asked for too much, and what to change."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from components.contracts.batch import Batch
from components.contracts.errors import TrainingError

REMEDY = "lower run.micro_batch_size or data.max_length, or set parallelism.activation_checkpointing=full"
HOST = ("not enough memory", "DefaultCPUAllocator", "Cannot allocate memory")
"""What torch's allocator of host memory says, in an ordinary RuntimeError."""


class MicrobatchOutOfMemory(TrainingError):
    """Memory ended in a micro-batch; the message says in which."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in HOST)


@contextmanager
def naming_microbatch(
    microbatches: Sequence[Batch], *, before: int = 0, after: int = 0
) -> Iterator[Callable[[int], None]]:
    """Around a pass over ``microbatches``; call what it yields with the number of each as it begins.

    ``before`` and ``after``: how many others of the same step have a pass of their own.

    Raises:
        MicrobatchTooLarge: memory ended; it names the last one begun.
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
        number, total = before + at + 1, before + len(microbatches) + after
        rows = len(batch.labels)
        raise MicrobatchOutOfMemory(
            f"out of memory in micro-batch {number} of {total} ({rows} {'row' if rows == 1 else 'rows'}, "
            f"{batch.labels.numel()} tokens, longest {int(batch.seqlens.max())}): {REMEDY}"
        ) from error


@contextmanager
def naming_step(step: str) -> Iterator[None]:
    """Around all of ``step``: what runs out of memory in it, in a micro-batch or beside them, says so.

    Raises:
        TrainingError: memory ended.
    """
    try:
        yield
    except MicrobatchOutOfMemory as error:
        raise TrainingError(f"{step}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or isinstance(error, TrainingError):
            raise
        raise TrainingError(f"{step}: out of memory: {REMEDY}") from error
