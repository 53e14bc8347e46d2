"""FLOPs of a train step and peak FLOP/s of a device, for the MFU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from components.contracts.data import BatchStats
from components.contracts.loss import Loss
from components.engines.shared.half_matmul import avoid_slow_products
from components.models.attention_shape import attention_shape
from components.models.experts import EXPERT_PARAM, moe_blocks, share_of_experts
from components.models.mtp import num_mtp_layers
from components.models.scalar_head import output_head
from components.preflight.estimates.data_sheets import GPUS, LONGEST_FIRST

MEASURE_SECONDS = 0.2


@dataclass(frozen=True)
class MatmulSizes:
    """Sizes of the matrix products of a model."""

    linear: float
    """Number of weights that a token is multiplied with, including only the experts chosen for it.
    Embeddings, which are looked up, and norms do not count."""
    head: float
    """Number of weights of the output head, which only labelled positions need."""
    attention: tuple[tuple[float, float], ...]
    """For each layer, the width of attention (heads x head_dim, the mean of keys and values) and its window
    in tokens."""
    frozen_linear: float = 0.0
    """Part of ``linear`` that is frozen and needs no weight gradient."""
    frozen_head: float = 0.0
    """Part of ``head`` that is frozen."""


def matmul_sizes(model: PreTrainedModel, *, adapted: bool = False) -> MatmulSizes:
    """Count the weights of ``model``, whose experts are separate modules and which may be on the meta device.

    ``adapted`` means that all weights are frozen. The few products of the adapter are not counted.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = output_head(model).weight
    skipped = {id(weight) for weight in (*tables, head)}
    chosen = share_of_experts(model)
    passes = 1 + num_mtp_layers(model.config)  # the head is applied once more per MTP depth
    weights = [
        (p.numel() * (chosen if EXPERT_PARAM.match(name) else 1.0), adapted or not p.requires_grad)
        for name, p in model.named_parameters()
        if p.ndim > 1 and id(p) not in skipped
    ]
    return MatmulSizes(
        sum(numel for numel, _ in weights),
        float(passes * head.numel()),
        attention_sizes(model.config),
        sum(numel for numel, frozen in weights if frozen),
        float(passes * head.numel() if adapted or not head.requires_grad else 0),
    )


def mlp_sizes(model: PreTrainedModel) -> dict[str, float]:
    """Return the number of weights that a token is multiplied with in the dense MLPs and in the MoE layers.

    The keys are the names of these modules in ``parallelism.recompute_modules``.
    """
    routed, chosen = tuple(f"{name}." for name in moe_blocks(model)), share_of_experts(model)
    sizes = {"mlp": 0.0, "moe": 0.0}
    for name, weight in model.named_parameters():
        if ".mlp." in name and weight.ndim > 1:
            used = chosen if EXPERT_PARAM.match(name) else 1.0
            sizes["moe" if name.startswith(routed) else "mlp"] += used * weight.numel()
    return sizes


def attention_sizes(config: PreTrainedConfig) -> tuple[tuple[float, float], ...]:
    text, found = config.get_text_config(), attention_shape(config)
    width = found.number * (found.key + found.value) / 2
    window = getattr(text, "sliding_window", None) or inf
    kinds = list(getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers)
    kinds += kinds[-1:] * num_mtp_layers(config)
    return tuple((width, window if kind == "sliding_attention" else inf) for kind in kinds)


def train_flops(
    sizes: MatmulSizes,
    *,
    num_tokens: int,
    num_labels: int,
    sum_squared_seqlens: float,
    forward_only: Sequence[MatmulSizes] = (),
) -> float:
    """Return the FLOPs that the matrix products of one training step need, forward and backward.

    This is the convention of PaLM (Chowdhery et al., 2022, appendix B), 6 x weights x tokens plus attention,
    with two corrections, so that only *needed* FLOPs count: attention is causal, so a sequence of T tokens
    has T^2 / 2 pairs instead of T^2, and the head is applied only to labelled positions, which in
    pre-training are all. Recomputed activations, padding and gradients of frozen weights do not count.

    Args:
        sum_squared_seqlens: Sum of squared lengths over the sequences of the step, packed or not.
        forward_only: For each pass without gradient over as many tokens, the sizes of its model.
    """

    def forward(of: MatmulSizes) -> float:
        pairs = sum(
            width * min(sum_squared_seqlens / 2, window * num_tokens) for width, window in of.attention
        )
        # Query times key and weight times value: two products with 2 FLOPs per pair and channel.
        return 2 * of.linear * num_tokens + 2 * of.head * num_labels + 4 * pairs

    unneeded = 2 * sizes.frozen_linear * num_tokens + 2 * sizes.frozen_head * num_labels
    return 3 * forward(sizes) + sum(map(forward, forward_only)) - unneeded


def passes_without_gradient(
    loss: Loss, policy: MatmulSizes, reference: MatmulSizes | None
) -> list[MatmulSizes]:
    """Return, for each forward pass without gradient in a step with ``loss``, the sizes of its model.

    KTO also runs mismatched answers through the policy and the reference. These are answers of other records,
    so such a pass counts with as many tokens as that of the trained answers.
    """
    passes = [] if reference is None else [reference]
    return [*passes, policy, *passes] if getattr(loss, "has_mismatched_answers", False) else passes


def step_flops(sizes: MatmulSizes, stats: BatchStats, forward_only: Sequence[MatmulSizes] = ()) -> float:
    """Return the FLOPs of a train step on the global batch that ``stats`` describes: see ``train_flops``."""
    return train_flops(
        sizes,
        num_tokens=stats.num_computed_tokens,
        num_labels=stats.num_labels,
        sum_squared_seqlens=stats.sum_squared_seqlens,
        forward_only=forward_only,
    )


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one rank: from a data sheet for known GPUs, otherwise measured once.

    The measurement repeats a square matrix product for 0.2 s with the threads of this process, so on a CPU
    the MFU is the fraction of time that matrix products need at their best speed.
    """
    if (known := sheet_peak(device, dtype)) is not None:
        return known
    if device.type == "cpu":
        avoid_slow_products("cpu", dtype)
        return measure_peak(device, dtype)
    measured = measure_peak(device, dtype)
    torch.accelerator.empty_cache()  # the parent process of a run measures a GPU that a rank needs next
    return measured


def sheet_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of ``device`` from its data sheet. None means that there is no data sheet."""
    return data_sheet_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return a phrase that names the source of ``peak_flops``, for messages about the MFU."""
    return "the measured matmul peak" if sheet_peak(device, dtype) is None else "the data sheet's peak"


def data_sheet_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of the GPU ``name``, such as "NVIDIA H100 80GB HBM3", from its data sheet.

    The data sheet is that with the longest name contained in ``name``. None means that there is none. Laptop
    GPUs have none: they have the names of desktop GPUs that are twice as fast.
    """
    words = f" {name.replace('-', ' ')} "
    if " Laptop " in words:
        return None
    for known in LONGEST_FIRST:
        if f" {known} " in words:
            return GPUS[known].half if dtype in (torch.bfloat16, torch.float16) else GPUS[known].full
    return None


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS) -> float:
    """Return the highest FLOP/s of a product of square matrices that is repeated for ``seconds``."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    torch.mm(a, b)
    best, deadline = inf, time.perf_counter() + seconds
    while best == inf or time.perf_counter() < deadline:  # once at least, however busy the machine is
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
