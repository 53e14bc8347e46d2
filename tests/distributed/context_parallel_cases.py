"""Rank functions of test_core_attention.py: shards and whole models, against mcore and transformers."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate

# This comes first, because it makes megatron work without a GPU.
from components.engines.megatron.runtime.attention import CoreAttention, packed_seq_params  # isort: split

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_batch_on_this_cp_rank

from components.contracts.batch import Batch
from components.engines.megatron.runtime.cp_sharding import gather_shards, shard_batch
from components.engines.shared.process_group import init_process_group
from tests.distributed.core_attention_cases import (
    HEAD_DIM,
    VOCAB,
    WINDOW,
    Case,
    atomic_write,
    collect,
    config,
    group_of,
    inputs,
    make_batch,
    real,
    row_of,
)


def rotary_errors(cases: list[Case]) -> list[float]:
    """Return errors of mcore's rotary embedding of a shard against transformers' at ``position_ids``."""
    group = group_of(cases[0].cp)
    return [rotary_error(case, group) for case in cases]


def rotary_error(case: Case, group: Any) -> float:
    batch = make_batch(case.lengths, case.layout)
    row = row_of(case, batch, group.rank())
    query = inputs(case, batch)[0].float()
    params = packed_seq_params(row)
    table = RotaryEmbedding(HEAD_DIM, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
    settings = config(case.cp, case.heads)
    length = table.get_rotary_seq_len(None, None, row.input_ids[0], settings, params)
    freqs = table(length, packed_seq=params is not None)
    local = atomic_write(query, row)
    if params is None:
        turned = apply_rotary_pos_emb(local, freqs, settings, cp_group=group)
    else:
        ends = params.cu_seqlens_q
        turned = apply_rotary_pos_emb(local[:, 0], freqs, settings, ends, cp_group=group).unsqueeze(1)
    got = collect(turned.flatten(2), row, group).view_as(query)
    llama = LlamaConfig(hidden_size=case.heads[0] * HEAD_DIM, num_attention_heads=case.heads[0])
    cos, sin = LlamaRotaryEmbedding(llama)(query, batch.position_ids)
    expected = rotate(query.transpose(1, 2), query.transpose(1, 2), cos, sin)[0].transpose(1, 2)
    return float(((got - expected) * real(batch)[..., None, None]).abs().max())


def zig_zag(cp: int) -> bool:
    """Return whether a padded row is split over cp ranks as mcore splits it."""
    init_process_group("cpu")
    parallel_state.initialize_model_parallel(1, context_parallel_size=cp)
    batch = make_batch((16, 16), "padded")
    theirs = get_batch_on_this_cp_rank({"tokens": batch.input_ids, "position_ids": batch.position_ids})
    row = shard_batch(batch, cp=cp, rank=parallel_state.get_context_parallel_rank(), multiple=1)
    parallel_state.destroy_model_parallel()
    return torch.equal(theirs["tokens"], row.input_ids) and torch.equal(
        theirs["position_ids"], row.position_ids
    )


def gather_errors(cp: int) -> list[tuple[float, float]]:
    """Return errors of gathered values and of the gradient of a nonlinear loss over them."""
    group = group_of(cp)
    return [gather_error(cp, layout, group) for layout in ("packed", "padded")]


def gather_error(cp: int, layout: str, group: Any) -> tuple[float, float]:
    batch = make_batch((7, 1, 20, 12), layout)
    row = shard_batch(batch, cp=cp, rank=group.rank(), multiple=1)
    leaf = torch.randn(batch.labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    leaf.requires_grad_()
    local = row.scatter(leaf.detach()).requires_grad_()
    for values in (leaf, gather_shards(local, row, group)):
        batch.sum_per_sequence(values).square().sum().backward()
    value_error = (gather_shards(local.detach(), row, group) - leaf.detach()).abs().max()
    assert leaf.grad is not None
    assert local.grad is not None
    return float(value_error), float((local.grad - row.scatter(leaf.grad)).abs().max())


def build(case: Case, *, ours: bool, recompute: bool = False) -> nn.Module:
    """Build a two-layer model whose second layer has a window, always with the same weights."""
    model_parallel_cuda_manual_seed(7)
    options: dict[str, Any] = {"init_method_std": 0.3}
    if recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if case.window and not ours:
        options |= {"window_size": (WINDOW - 1, 0), "window_attn_skip_freq": [0, 1]}
    if ours:
        options["cp_comm_type"] = case.kind
    settings = config(case.cp, (4, 2), normalization="RMSNorm", add_bias_linear=False, **options)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if ours:
        settings.windows = (None, case.window)
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return GPTModel(settings, spec, VOCAB, 64, position_embedding_type="rope", rotary_base=100)


def model_errors(cases: list[Case]) -> list[tuple[float, float]]:
    """Return the errors of logits and gradients of each case, without and then with recomputation.

    The reference is mcore's own attention on one sequence at a time. Errors of gradients are relative to the
    largest gradient.
    """
    init_process_group("cpu")
    return [model_error(case, recompute) for case in cases for recompute in (False, True)]


def model_error(case: Case, recompute: bool) -> tuple[float, float]:
    batch = make_batch(case.lengths, case.layout)
    weight = torch.randn(*batch.labels.shape, VOCAB, generator=torch.Generator().manual_seed(6))
    weight *= real(batch)[..., None]
    wanted, expected = run_theirs(case, batch, weight)
    got, grads = run_ours(case, batch, weight, recompute)
    error = ((got - wanted) * real(batch)[..., None]).abs().max()
    worst = max((a - b).abs().max() for a, b in zip(grads, expected, strict=True))
    return float(error), float(worst / max(grad.abs().max() for grad in expected))


def run_theirs(case: Case, batch: Batch, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return logits ``[B, T, V]`` and gradients of ``(weight * logits).sum()``."""
    parallel_state.initialize_model_parallel(1)
    theirs = build(replace(case, cp=1), ours=False)
    logits = separately(theirs, batch)
    (logits * weight).sum().backward()
    parallel_state.destroy_model_parallel()
    return logits, [parameter.grad for parameter in theirs.parameters()]


def run_ours(case: Case, batch: Batch, weight: Tensor, recompute: bool) -> tuple[Tensor, list[Tensor]]:
    parallel_state.initialize_model_parallel(1, context_parallel_size=case.cp)
    ours = build(case, ours=True, recompute=recompute)
    group = parallel_state.get_context_parallel_group()
    row = row_of(case, batch, group.rank())
    logits = ours(row.input_ids, row.position_ids, None, packed_seq_params=packed_seq_params(row))
    (logits * atomic_write(weight, row).transpose(0, 1)).sum().backward()
    for parameter in ours.parameters():
        dist.all_reduce(parameter.grad, group=group)
    whole = collect(logits.transpose(0, 1), row, group)
    parallel_state.destroy_model_parallel()
    return whole, [parameter.grad for parameter in ours.parameters()]


def separately(lm: nn.Module, batch: Batch) -> Tensor:
    """Return logits ``[B, T, V]``, computed one sequence at a time, 0 on padding."""
    out = torch.zeros(*batch.labels.shape, VOCAB)
    starts = None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for number, length in enumerate(batch.seqlens.tolist()):
        line, begin = (number, 0) if starts is None else (0, starts[number])
        ids = batch.input_ids[line : line + 1, begin : begin + length]
        with patch.object(torch, "ones", ones_anywhere):
            out[line, begin : begin + length] = lm(ids, torch.arange(length)[None], None)[0]
    return out


def ones_anywhere(*args: Any, ones: Any = torch.ones, **options: Any) -> Tensor:
    """Replace `torch.ones` and ignore the device, because mcore's attention makes its mask on "cuda"."""
    return ones(*args, **{name: value for name, value in options.items() if name != "device"})
