"""Parameter counts, FLOPs and estimated time of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from components.engines.fsdp2.float8 import float8_linears
from components.engines.fsdp2.parallelize import block_prefixes
from components.models.attention_shape import attention_shape
from components.models.experts import BIAS, moe_blocks, number_of_experts, share_of_experts
from components.models.mtp import num_mtp_layers
from components.models.scalar_head import has_scalar_head, ties_embedding
from components.preflight.engine_layouts import comm_cost, has_owners, mesh_info
from components.preflight.estimates.device_specs import HOST, Device
from components.preflight.estimates.flops import (
    MatmulSizes,
    matmul_sizes,
    mlp_sizes,
    passes_without_gradient,
    step_flops,
)
from components.preflight.estimates.parameter_counts import model_parameters
from components.preflight.estimates.quantities import CommInputs, ModelSize
from components.preflight.estimates.workload import first_steps, padded_tokens, step_stats
from components.preflight.search.candidate import Candidate


def parameter_counts(case: Candidate) -> dict[str, int]:
    """Return the numbers of total, trainable and active parameters.

    Active parameters are those that a token uses, without the experts that are not chosen for it.
    """
    found = model_parameters(case.model, case.adapter)
    idle = (1 - share_of_experts(case.model)) * sum(p.numel for p in found if p.of_experts)
    total = sum(p.numel for p in found)
    moved = BIAS if case.adapter is None else ()  # router biases have no gradient, but training changes them
    trained = sum(p.numel for p in found if p.trained or p.name.endswith(moved))
    return {"total": total, "trainable": trained, "active": total - round(idle)}


def model_size(case: Candidate) -> ModelSize:
    config, of = case.model.config.get_text_config(), attention_shape(case.model.config)
    counts, found = parameter_counts(case), model_parameters(case.model, case.adapter)
    experts, in_4_bits = [p for p in found if p.of_experts], [p for p in found if p.quantized_bytes]
    layers, in_blocks = moe_blocks(case.model), tuple(block_prefixes(case.model))
    return ModelSize(
        parameters=counts["total"],
        trained=counts["trainable"],
        layers=config.num_hidden_layers + num_mtp_layers(config),
        hidden=config.hidden_size,
        q_width=of.number * (of.key + of.value) // 2,
        kv_width=of.shared * (of.key + of.value) // 2,
        kv_heads=of.shared,
        scalar_head=has_scalar_head(case.model),
        outside_blocks=sum(p.numel for p in found if not p.name.startswith(in_blocks)),
        experts=sum(p.numel for p in experts),
        trained_experts=sum(p.numel for p in experts if p.trained),
        mtp_layers=num_mtp_layers(config),
        num_experts=number_of_experts(case.model),
        num_moe_layers=len(layers),
        top_k=config.num_experts_per_tok if layers else 0,
        has_shared_experts=any(
            getattr(block, "shared_experts", None) is not None for block in layers.values()
        ),
        quantized=sum(p.numel for p in in_4_bits),
        quantized_bytes=sum(p.quantized_bytes for p in in_4_bits),
        float8=sum(linear.weight.numel() for linear in float8_linears(case.model).values()) * case.float8,
        shared_by_stages=embedding_of_stages(case),
    )


def embedding_of_stages(case: Candidate) -> int:
    """Return the size of the embedding if it is trained and is also the head, or is used by MTP layers."""
    weight = case.model.get_input_embeddings().get_parameter("weight")
    shared = ties_embedding(case.model) or num_mtp_layers(case.model.config) > 0
    return weight.numel() if shared and case.adapter is None and weight.requires_grad else 0


@dataclass(frozen=True)
class StepWork:
    """Sizes and FLOPs of a step that do not depend on the layout, as means over several steps."""

    size: ModelSize
    sequences: float
    tokens: float
    labels: float
    computed: float
    """Tokens, with prompts shared by several sequences counted once."""
    padded: float
    """Computed tokens, with the padding of padded rows."""
    flops: float
    forward: float
    """FLOPs of one forward pass."""
    modules: Mapping[str, float]
    """FLOPs of each module of ``parallelism.recompute_modules`` in one forward pass. Those of ``core_attn``
    are QK^T and weights times V."""


def step_work(case: Candidate, step: int | None = None) -> StepWork:
    """Return the sizes and FLOPs of one ``step``, or else their means over the first steps of the run.

    ``flops`` are those that ``perf/mfu`` counts, including the passes without gradient.
    """
    sizes = matmul_sizes(case.model, adapted=case.adapter is not None)
    numbers = first_steps(case.data) if step is None else [step]
    steps = [step_stats(case.data, number) for number in numbers]
    reference = None if case.reference == "none" else matmul_sizes(case.reference_model or case.model)
    passes = passes_without_gradient(case.loss, sizes, reference)
    unfrozen = replace(sizes, frozen_linear=0.0, frozen_head=0.0)
    attention = MatmulSizes(0.0, 0.0, sizes.attention)
    computed = fmean(step.num_computed_tokens for step in steps)
    of_mlps = {name: 2 * weights * computed for name, weights in mlp_sizes(case.model).items()}
    return StepWork(
        size=model_size(case),
        sequences=fmean(step.num_tokens / step.seqlen_mean for step in steps),
        tokens=fmean(step.num_tokens for step in steps),
        labels=fmean(step.num_labels for step in steps),
        computed=computed,
        padded=fmean(padded_tokens(case.data, case.micro_batch_size, number) for number in numbers),
        flops=fmean(step_flops(sizes, step, passes) for step in steps),
        forward=fmean(step_flops(unfrozen, step) / 3 for step in steps),
        modules=of_mlps | {"core_attn": fmean(step_flops(attention, step) / 3 for step in steps)},
    )


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step and their parts."""

    compute: float
    """Seconds of computation at the assumed MFU, including recomputation."""
    waiting: float
    """Seconds of communication that does not overlap with computation, within or at the end of the step."""
    idle: float
    """Seconds in the pipeline bubble."""
    overlapped: float
    """Seconds of communication that overlaps with computation and the bubble; the longer of both counts."""

    @property
    def total(self) -> float:
        return max(self.compute + self.idle, self.overlapped) + self.waiting

    def to_json(self) -> dict[str, float]:
        """Return the total as ``seconds``, and each part, such as ``compute_s``."""
        return {"seconds": self.total} | {f"{part}_s": seconds for part, seconds in vars(self).items()}


def comm_inputs(case: Candidate, work: StepWork, stage: int | None = None) -> CommInputs:
    """Return the inputs of the estimate of communication, on one pipeline ``stage``: see ``CommInputs``.

    With unpaired data, the pass of the reference also has the mismatched answers, which are about as many
    tokens as the others, and a loss may have a pass of the policy over them. Micro-batches of packed rows are
    merged in these passes.
    """
    has_reference = case.reference != "none"
    of_policy = bool(getattr(case.loss, "has_mismatched_answers", False))
    every = getattr(case.loss, "sync_reference_every", 0)
    return CommInputs(
        case.world_size,
        case.dtype,
        work.padded / case.dp_size,
        case.microbatch.num_microbatches,
        forward_passes=has_reference * (1 + (case.loss.kind == "unpaired")) + of_policy,
        forward_calls=has_reference + of_policy,
        merges=case.data.packing != "none",
        stage=stage,
        whole_weights=has_owners(case.layout, case.optimizer),
        synced=1 / every if every else 0,
    )


def step_time(case: Candidate, work: StepWork) -> StepTime:
    """Estimate the time of a step from ``work``, divided evenly over ranks, and the layout's ``StepCost``."""
    device = case.device
    cost = comm_cost(case.layout, work.size, comm_inputs(case, work))
    again = cost.recomputed * work.forward
    again += sum(share * work.modules[name] for name, share in cost.recomputed_modules.items())
    # Forward and backward pass. Overestimated if there are shared experts, which get no padding.
    again += 3 * cost.padding * work.modules["moe"]
    compute = (work.flops + again) / (case.world_size * device.flops * device.mfu)
    dims = mesh_info(case.layout, case.world_size)["dims"]
    seconds = dict.fromkeys(("exposed", "overlapped", "at_end"), 0.0)
    for sent in cost.volumes:
        seconds[sent.when] += sent.num_bytes / bandwidth(device, dims, sent.dimension, sent.span)
    idle = (compute + seconds["exposed"]) * cost.bubble / (1 - cost.bubble)
    return StepTime(compute, seconds["exposed"] + seconds["at_end"], idle, seconds["overlapped"])


def bandwidth(
    device: Device, dims: Mapping[str, int], dimension: str, neighbours: int | None = None
) -> float:
    """Return the bytes/s between the ranks of ``dimension``, or between ``neighbours`` ranks if given.

    This is the speed of the slowest link: that of the network if the ranks are on several nodes.
    """
    if dimension == "host":
        return HOST
    if neighbours is not None:
        return device.link if neighbours <= device.per_node else device.network
    span = 1
    for name, size in reversed(list(dims.items())):
        span *= size
        if name == dimension:
            break
    return device.link if span <= device.per_node else device.network
