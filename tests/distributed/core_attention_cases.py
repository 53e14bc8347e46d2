"""Rank functions of test_core_attention.py: our core attention against the softmax formula.

Every group of ``cp`` ranks computes the whole case.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# This comes first, because it makes megatron work without a GPU.
from components.engines.megatron.runtime.attention import CoreAttention, packed_seq_params  # isort: split

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from components.contracts.batch import IGNORE, Batch
from components.engines.megatron.runtime.cp_sharding import CPShard, shard_batch
from components.engines.shared.process_group import init_process_group

VOCAB, WINDOW, HEAD_DIM = 40, 5, 8
FUSIONS = {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False}


@dataclass(frozen=True)
class Case:
    cp: int
    kind: str
    layout: str
    lengths: tuple[int, ...] = (7, 1, 20, 12)
    heads: tuple[int, int] = (4, 2)
    """Numbers of query heads and of key-value heads."""
    window: int | None = None
    longer: int = 0
    """Padding at the end of the row, in units of 2 * cp positions."""


def make_batch(lengths: tuple[int, ...], layout: str) -> Batch:
    g = torch.Generator().manual_seed(2)
    sequences = [torch.randint(1, VOCAB, (n,), generator=g) for n in lengths]
    positions = [torch.arange(n) for n in lengths]
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    if layout == "packed":
        ids, ends = torch.cat(sequences)[None], F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        return Batch(ids, ids, torch.cat(positions)[None], seqlens, cu_seqlens=ends, max_seqlen=max(lengths))
    ids, labels, places = (
        nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
        for tensors, fill in ((sequences, 0), (sequences, IGNORE), (positions, 0))
    )
    return Batch(ids, labels, places, seqlens)


def group_of(cp: int) -> Any:
    """Return this rank's group of ``cp`` ranks. Every rank of the world calls it."""
    init_process_group("cpu")
    # Groups are disjoint: a rank could end, and close its sockets, before others have connected to it.
    dist.barrier()
    parts = [list(range(begin, begin + cp)) for begin in range(0, dist.get_world_size(), cp)]
    return dist.new_subgroups_by_enumeration(parts)[0]


def row_of(case: Case, batch: Batch, rank: int) -> CPShard:
    length = shard_batch(batch, cp=case.cp, rank=0, multiple=1).input_ids.shape[1] * case.cp
    return shard_batch(batch, cp=case.cp, rank=rank, multiple=1, length=length + case.longer * 2 * case.cp)


def atomic_write(values: Tensor, row: CPShard, junk: int | None = None) -> Tensor:
    """Split ``[B, T, heads, D]`` into this rank's ``[L, B, heads, D]``.

    Padding is zero, or random with the seed ``junk``.
    """
    shape = (len(values), row.cp * row.input_ids.shape[1], *values.shape[2:])
    whole = values.new_zeros(shape)
    if junk is not None:
        whole.normal_(generator=torch.Generator().manual_seed(junk))
    for line, index, content in zip(whole, row.index, values, strict=True):
        line[index] = content
    return whole.chunk(row.cp, 1)[row.rank].transpose(0, 1)


def collect(out: Tensor, row: CPShard, group: Any) -> Tensor:
    """Gather ``[L, B, X]`` of every rank to ``[B, T, X]``."""
    local = out.detach().transpose(0, 1).contiguous()
    shares = [torch.empty_like(local) for _ in range(row.cp)]
    dist.all_gather(shares, local, group=group)
    lines = zip(torch.cat(shares, 1), row.index, strict=True)
    return torch.stack([line[index] for line, index in lines])


def real(batch: Batch) -> Tensor:
    """Return bool ``[B, T]``, False on padding."""
    return batch.labels != IGNORE


def config(cp: int, heads: tuple[int, int], **options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=heads[0] * HEAD_DIM,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        context_parallel_size=cp,
        attention_dropout=options.pop("dropout", 0.0),
        hidden_dropout=0.0,
        **FUSIONS,
        **options,
    )


def core(case: Case, group: Any, **options: Any) -> CoreAttention:
    settings = config(case.cp, case.heads, **options)
    settings.windows = (None, case.window)
    collection = SimpleNamespace(cp=group)
    return CoreAttention(
        settings, 2, AttnMaskType.causal, "self", cp_comm_type=case.kind, pg_collection=collection
    )


def run(module: nn.Module, row: CPShard, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call core attention as mcore's attention does."""
    params = packed_seq_params(row)
    if params is None:
        return module(query, key, value, None)
    q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
    return module(q, k, v, None, packed_seq_params=params).unsqueeze(1)


def inputs(case: Case, batch: Batch) -> list[Tensor]:
    """Return query, key, value and output gradient (0 on padding), float64 ``[B, T, heads, D]``."""
    g, (queries, keys) = torch.Generator().manual_seed(3), case.heads
    shapes = [(*batch.labels.shape, n, HEAD_DIM) for n in (queries, keys, keys, queries)]
    *tensors, grad = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return [*tensors, grad * real(batch)[..., None, None]]


def errors(cases: list[Case]) -> list[tuple[float, float, bool]]:
    """Return for each case the largest errors of output and gradients, and whether padding has no effect."""
    group = group_of(cases[0].cp)
    return [error(case, group) for case in cases]


def error(case: Case, group: Any) -> tuple[float, float, bool]:
    batch = make_batch(case.lengths, case.layout)
    row, module = row_of(case, batch, group.rank()), core(case, group)
    *qkv, grad = inputs(case, batch)
    keep = real(batch)[..., None]
    leaves = [atomic_write(tensor * keep[..., None], row, junk=1).requires_grad_() for tensor in qkv]
    local = run(module, row, *leaves)
    local.backward(atomic_write(grad, row).flatten(2))
    out = collect(local, row, group) * keep
    noisy = [torch.where(keep[..., None], tensor, 9.0) for tensor in qkv]
    other = (
        collect(run(module, row, *(atomic_write(tensor, row, junk=2) for tensor in noisy)), row, group) * keep
    )
    wrong = (out - softmax_attention(case, batch, *qkv)).abs().max()
    expected = [atomic_write(tensor, row) for tensor in softmax_gradients(case, batch)]
    gradients = [(leaf.grad - wanted).abs().max() for leaf, wanted in zip(leaves, expected, strict=True)]
    return float(wrong), float(max(gradients)), torch.equal(out, other)


def softmax_attention(case: Case, batch: Batch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention by the softmax formula for each sequence: ``[B, T, heads * D]``, 0 on padding."""
    group = case.heads[0] // case.heads[1]
    starts = [0] * len(case.lengths) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    out = torch.zeros(*batch.labels.shape, case.heads[0] * HEAD_DIM, dtype=query.dtype)
    for number, length in enumerate(case.lengths):
        line, begin = (0, starts[number]) if batch.cu_seqlens is not None else (number, 0)
        q, k, v = (tensor[line, begin : begin + length] for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (case.window or length))
        probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[line, begin : begin + length] = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    return out


def softmax_gradients(case: Case, batch: Batch) -> list[Tensor]:
    *qkv, grad = inputs(case, batch)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    softmax_attention(case, batch, *leaves).backward(grad.flatten(2))
    return [leaf.grad for leaf in leaves]


def dropped(cases: list[Case], sequence_parallel: bool) -> list[dict[str, bool]]:
    """Return for each case which outputs dropout changes, and whether the default generator advances."""
    init_process_group("cpu")
    parallel_state.initialize_model_parallel(1, context_parallel_size=cases[0].cp)
    model_parallel_cuda_manual_seed(5)
    group = parallel_state.get_context_parallel_group()
    answers = [drop(case, group, sequence_parallel) for case in cases]
    parallel_state.destroy_model_parallel()
    return answers


def drop(case: Case, group: Any, sequence_parallel: bool) -> dict[str, bool]:
    batch = make_batch(case.lengths, case.layout)
    row = row_of(case, batch, group.rank())
    tensors = [atomic_write(tensor, row) for tensor in inputs(case, batch)[:3]]
    module = core(case, group, dropout=0.5)
    module.config.sequence_parallel = sequence_parallel
    evaluated = [run(module.eval(), row, *tensors) for _ in range(2)]
    module.train()
    before = torch.get_rng_state()
    first, second = (run(module, row, *tensors) for _ in range(2))
    moved = not torch.equal(before, torch.get_rng_state())
    return {
        "eval is exact": torch.equal(*evaluated),
        "train drops": not torch.allclose(first, evaluated[0]),
        "draws are new": not torch.equal(first, second),
        "ordinary generator moved": moved,
    }
