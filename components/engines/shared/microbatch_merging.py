"""Merging of packed micro-batches into larger ones, for a forward pass without gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import Batch

MAX_TOKENS = {"cpu": 4096, "cuda": 32768, "xpu": 32768, "npu": 32768}
"""Maximum number of tokens of a merged micro-batch, by device type. Without gradient, only the activations of
one block exist at a time. On a GPU they take less memory than those of a training micro-batch of a few
thousand tokens: with hidden size 4096 and intermediate size 14336, about 130 kB per token in bf16, 4 GiB in
all. With larger micro-batches, weights are gathered less often and fewer kernels are launched. A CPU is not
faster with 4,000 or 16,000 tokens than with micro-batches of 2,000."""


def group_microbatches(
    microbatches: Sequence[Batch], group: dist.ProcessGroup, device: torch.device
) -> list[list[Batch]]:
    """Group consecutive micro-batches, equally many per group, with at most ``MAX_TOKENS`` tokens per group.

    The last group may be smaller. If any micro-batch has more than ``MAX_TOKENS`` tokens or is padded, every
    micro-batch is a group of its own.
    Collective: every rank of ``group`` passes the same number of micro-batches and gets the same number of
    groups, because with sharded weights each forward pass is collective.
    """
    if any(batch.cu_seqlens is None for batch in microbatches):
        return [[batch] for batch in microbatches]
    sizes = [batch.labels.numel() for batch in microbatches]
    # In host memory, so that no GPU waits.
    number = torch.tensor(largest_number(sizes, MAX_TOKENS[device.type]))
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    each = int(number)
    return [list(microbatches[i : i + each]) for i in range(0, len(microbatches), each)]


def largest_number(sizes: Sequence[int], bound: int) -> int:
    """Return the largest number of sizes per group, at least 1, with no sum of a group above ``bound``."""
    for number in range(len(sizes), 1, -1):
        sums = (sum(sizes[i : i + number]) for i in range(0, len(sizes), number))
        if all(total <= bound for total in sums):
            return number
    return 1


def merge(batches: Sequence[Batch]) -> Batch:
    """Merge packed batches into one for computing log-probabilities, without the inputs of a loss.

    The host does not wait for a device.
    """
    if len(batches) == 1:
        return batches[0]
    ends, prefixes, labelled, offset = [], [], [], 0
    for batch in batches:
        assert batch.cu_seqlens is not None, "only packed batches are joined"
        ends.append(batch.cu_seqlens[1:] + offset)
        prefixes.append(
            torch.zeros_like(batch.seqlens) if batch.prefix_lengths is None else batch.prefix_lengths
        )
        labelled.append(batch.labelled() + offset)
        offset += batch.labels.numel()
    shared = any(batch.prefix_lengths is not None for batch in batches)
    keys = [batch.sequence_keys for batch in batches if batch.sequence_keys is not None]
    return Batch(
        input_ids=torch.cat([batch.input_ids for batch in batches], 1),
        labels=torch.cat([batch.labels for batch in batches], 1),
        position_ids=torch.cat([batch.position_ids for batch in batches], 1),
        seqlens=torch.cat([batch.seqlens for batch in batches]),
        cu_seqlens=F.pad(torch.cat(ends), (1, 0)),
        sequence_keys=torch.cat(keys) if len(keys) == len(batches) else None,
        max_seqlen=max(batch.max_seqlen or 0 for batch in batches),
        prefix_lengths=torch.cat(prefixes) if shared else None,
        num_keys=sum(batch.num_keys or batch.labels.numel() for batch in batches) if shared else None,
        label_index=torch.cat(labelled),
    )


def unmerge(values: Tensor, batches: Sequence[Batch]) -> list[Tensor]:
    """Split ``values``, which have the shape of ``merge(batches).labels``, into one tensor per batch."""
    return list(values.split([batch.labels.shape[1] for batch in batches], dim=1))
