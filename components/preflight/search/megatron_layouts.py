"""Megatron layouts for the forecast: communication costs, changes that save memory, enumeration."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

from components.contracts.json_types import Config, Json
from components.engines.megatron.layout import Layout
from components.engines.megatron.pipeline_split import layers_of_chunks
from components.engines.shared.parallel_dims import divisors
from components.engines.shared.recomputation import recompute_more, recomputed_modules, recomputed_share
from components.preflight.estimates.communication import (
    FP32,
    all_gather_bytes,
    all_reduce_bytes,
    expert_gather_volume,
    key_value_volume,
    token_dispatch_volume,
    tp_volume,
    ulysses_volume,
)
from components.preflight.estimates.quantities import CommInputs, CommVolume, ModelSize, StepCost


def mesh_dims(layout: Layout, world_size: int) -> tuple[dict[str, int], dict[str, int] | None]:
    """Return the sizes of the mesh in the rank order of Megatron, outermost first: tp ranks are neighbours.

    The second dictionary has the sizes of the mesh of experts. None means that experts are not split.
    """
    pp, cp, tp, ep, etp = layout.pp, layout.cp, layout.tp, layout.ep, layout.etp
    dims = {"pp": pp, "dp": world_size // layout.model_ranks, "cp": cp, "tp": tp}
    experts = {"pp": pp, "dp": world_size // (pp * ep * etp), "ep": ep, "etp": etp}
    return dims, experts if ep * etp > 1 else None


def comm_cost(layout: Layout, size: ModelSize, step: CommInputs) -> StepCost:
    """Estimate the communication and the pipeline bubble of a step.

    With p stages of v chunks each and m micro-batches, a stage is idle for ``p - 1`` of ``m v + p - 1`` time
    slots (Narayanan et al., 2021, section 2.2). If v > 1, micro-batches of padding round m up to a multiple
    of p. They are communicated like others, and their time slots count as idle.
    """
    tp, pp, cp, dp = layout.tp, layout.pp, layout.cp, step.world_size // layout.model_ranks
    itemsize = step.dtype.itemsize
    sent = [*gradient_bytes(layout, size, dp * cp, step)]
    if step.whole_weights:
        sent += (v for v in whole_updates(layout, size, dp * cp, itemsize) if v.num_bytes)
    number = step.num_microbatches
    done = -(-number // pp) * pp if layout.vpp > 1 else number
    tokens = step.tokens * done / number
    own, how = tokens / cp, layout.activation_checkpointing
    chunks = layers_of_chunks(layout, size.layers)
    recomputed = recomputed_share(how, layout.recompute_num_layers, chunks)
    modules = recomputed_modules(how, layout.recompute_modules)
    passes = 2 + recomputed + step.forward_passes  # forward, backward, recomputed, without gradient
    exchanges = passes + ("moe" in modules)
    layers = {"layers": size.layers / pp, "num_moe_layers": size.num_moe_layers / pp}
    stage = ModelSize(**vars(size) | layers)
    if cp > 1:
        exchange = ulysses_volume if layout.cp_comm_type == "a2a" else key_value_volume
        attended = passes + ("core_attn" in modules)
        sent.append(exchange(stage, cp, tp, tokens, itemsize, passes=attended))
    if tp > 1:
        hidden = own * size.hidden * itemsize
        # With sequence parallelism, gradients of weights need the gathered inputs again.
        again = 4 * recomputed + 2 * (layout.sequence_parallel and size.all_trained)
        whole = 0.0 if size.has_shared_experts else stage.num_moe_layers
        dense, shared = stage.layers - stage.num_moe_layers, stage.num_moe_layers - whole
        sent.append(
            tp_volume(
                stage,
                tp,
                hidden,
                ends=1 / pp,
                sequence_parallel=layout.sequence_parallel,
                repeated=again,
                forward_passes=step.forward_passes,
                whole_mlps=whole,
                repeated_mlps=dense * ("mlp" in modules) + shared * ("moe" in modules),
                # The matrix has an input of twice the hidden size, and its result is gathered.
                merges=8 + 3 * recomputed if layout.sequence_parallel else 5 + recomputed,
            )
        )
    sent += expert_volumes(layout, stage, own / tp, itemsize, exchanges)
    if pp > 1:
        width = size.hidden / (tp if layout.sequence_parallel else 1)
        sent += pipeline_volumes(layout, size, step, own * width * itemsize)
    if layout.optimizer_cpu_offload:
        trained = size.trained / (tp * pp)
        sent.append(CommVolume("host", trained * (FP32 + itemsize) / (dp * cp), when="at_end"))
    turns = done * layout.vpp + pp - 1
    idle = 1 - number * layout.vpp / turns
    padding = layout.padding_factor - 1
    return StepCost(sent, idle, recomputed, dict.fromkeys(modules, 1.0), padding)


def pipeline_volumes(
    layout: Layout, size: ModelSize, step: CommInputs, num_bytes: float
) -> Iterator[CommVolume]:
    """Estimate what a stage sends to the others, for hidden states of ``num_bytes``.

    The last chunk of the model sends no hidden states, and the first chunk no gradients. The first and the
    last stage add up the gradients of the embedding that both have. Without ``step.stage``, the result is
    that of the stage that sends most in all.
    """
    last = layout.pp - 1

    def sends(stage: int) -> int:
        forward = layout.vpp - (stage == last)
        return (1 + step.forward_passes) * forward + layout.vpp - (stage == 0)

    shared = all_reduce_bytes(size.shared_by_stages / layout.tp * FP32, 2)
    stages = range(layout.pp) if step.stage is None else [step.stage]
    exposed, at_end = max(
        ((sends(stage) * num_bytes, shared * (stage in (0, last))) for stage in stages), key=sum
    )
    yield CommVolume("pp", exposed, when="exposed")
    yield CommVolume("pp", at_end, when="at_end")


def expert_volumes(
    layout: Layout, stage: ModelSize, tokens: float, itemsize: int, passes: float
) -> Iterator[CommVolume]:
    """Estimate the exchange of tokens in the MoE layers of a stage; each rank has ``tokens`` of its own.

    With the all-to-all, each rank sends copies of its tokens to the ep ranks of their experts, and etp ranks
    gather what they received. With the all-gather, every rank gets the tokens of all ep x etp ranks, once.
    """
    ep, etp, span = layout.ep, layout.etp, layout.ep * layout.etp
    if span == 1:
        return
    if layout.moe_token_dispatcher == "allgather":
        whole = replace(stage, top_k=1)
        volume = expert_gather_volume(whole, span, tokens * span, itemsize, passes=passes)
        yield replace(volume, dimension="ep" if ep > 1 else "etp")
        return
    copies = tokens * layout.padding_factor
    if ep > 1:
        yield token_dispatch_volume(stage, ep, copies, itemsize, passes=passes, span=span)
    if etp > 1:
        yield expert_gather_volume(stage, etp, copies * etp, itemsize, passes=passes)


def gradient_bytes(layout: Layout, size: ModelSize, ranks: int, step: CommInputs) -> Iterator[CommVolume]:
    """Estimate the bytes of gradients in fp32, reduced once per step over ``ranks``, and of updated weights.

    Expert gradients are reduced over the ranks with the same experts. The distributed optimizer uses a
    reduce-scatter and gathers the updated weights, except with an optimizer of full (unsharded) weights. A
    reference that follows the trained weights needs their fp32 masters, which an all-reduce puts together.
    """
    alike = ranks * layout.tp // (layout.ep * layout.etp)
    split, dealt = layout.tp * layout.pp, layout.ep * layout.etp * layout.pp

    def sent(whole: int, experts: int, how: Callable[[float, int], float]) -> float:
        return how((whole - experts) / split, ranks) + how(experts / dealt, alike)

    scattered = layout.distributed_optimizer and not step.whole_weights
    how = all_gather_bytes if scattered else all_reduce_bytes
    num_bytes = sent(size.trained, size.trained_experts, how) * FP32
    yield CommVolume("dp", num_bytes, when="overlapped" if layout.overlap_grad_reduce else "at_end")
    if scattered:
        num_bytes = sent(size.trained, size.trained_experts, all_gather_bytes) * step.dtype.itemsize
        overlapped = layout.gathers_during_forward(whole_updates=step.whole_weights)
        yield CommVolume("dp", num_bytes, when="overlapped" if overlapped else "at_end")
        if step.synced:
            num_bytes = step.synced * sent(size.trained, size.trained_experts, all_reduce_bytes) * FP32
            yield CommVolume("dp", num_bytes, when="at_end")


def whole_updates(layout: Layout, size: ModelSize, ranks: int, itemsize: int) -> Iterator[CommVolume]:
    """Estimate the bytes of gathering fp32 gradients on the owners and of sending the updated weights.

    Communication between the ranks that split an expert counts as tensor parallelism.
    """
    tp, dealt = layout.tp, layout.ep * layout.etp
    for whole, split, copies in (
        ((size.trained - size.trained_experts) / layout.pp, tp, ranks),
        (size.trained_experts / (layout.ep * layout.pp), layout.etp, ranks * tp // dealt),
    ):
        over = copies if layout.distributed_optimizer else 1
        parts = all_gather_bytes(whole, split) * FP32 + all_gather_bytes(whole, split) * itemsize
        yield CommVolume("tp", parts / over, when="at_end")
        yield CommVolume("dp", all_gather_bytes(whole / split, over) * itemsize, when="at_end")


def memory_savers(layout: Layout, world_size: int) -> list[Json]:
    """Return changes of keys that may save memory, first those that keep the number of ranks."""
    dp = world_size // layout.model_ranks
    found = recompute_more(
        layout.activation_checkpointing, layout.recompute_modules, layout.recompute_num_layers
    )
    if not layout.distributed_optimizer and dp * layout.cp > 1:
        found.append({"distributed_optimizer": True})
    if not layout.sequence_parallel and layout.tp > 1:
        found.append({"sequence_parallel": True})
    if not layout.optimizer_cpu_offload:
        found.append({"optimizer_cpu_offload": True, "distributed_optimizer": True})
    found.append({"ep": 2 * layout.ep})
    for key in ("tp", "pp", "cp"):
        size = getattr(layout, key) * 2
        if dp % 2 == 0:
            found.append({key: size, "dp": dp // 2})
        found.append({key: size, "dp": dp})
    found += [{"dp": dp * times, "distributed_optimizer": True} for times in (2, 4, 8)]
    return [keys for keys in found if shares_experts(vars(layout) | {"dp": dp} | keys)]


def shares_experts(keys: Config) -> bool:
    """Return whether ep x etp divides the number of ranks of a pipeline stage."""
    return bool((keys["tp"] * keys["cp"] * keys["dp"]) % (keys["ep"] * keys["etp"]) == 0)


def enumerate_layouts(
    devices: int, per_node: int, num_layers: int, *, sharded: bool, experts: int = 0
) -> Iterator[Config]:
    """Yield the keys of every layout of ``devices`` ranks, with tensor parallelism only within a node.

    ``sharded`` selects the distributed optimizer. ``experts`` is the number of experts of a layer, 0 without
    any; their matrices are not split.
    """
    for tp in divisors(devices):
        if tp > per_node:
            continue
        for pp in divisors(devices // tp):
            if num_layers % pp:
                continue
            for cp in divisors(devices // (tp * pp)):
                dp = devices // (tp * pp * cp)
                chunks = [n for n in (1, 2, 4) if num_layers // pp % n == 0] if pp > 1 else [1]
                keys = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "sequence_parallel": tp > 1}
                keys["distributed_optimizer"] = sharded and dp * cp > 1
                parts = divisors(gcd(experts, tp * cp * dp) if experts else 1)
                yield from (keys | {"vpp": vpp, "ep": ep} for vpp in chunks for ep in parts)
