"""FSDP2 layouts for the forecast: communication costs, changes that save memory, enumeration."""

from collections.abc import Collection, Iterator
from math import gcd

from components.contracts.json_types import Config, Json
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.shared.parallel_dims import divisors
from components.engines.shared.recomputation import recompute_more, recomputed_modules, recomputed_share
from components.preflight.estimates.communication import (
    FP32,
    all_gather_bytes,
    all_reduce_bytes,
    token_dispatch_volume,
    tp_volume,
    ulysses_volume,
)
from components.preflight.estimates.quantities import CommInputs, CommVolume, ModelSize, StepCost


def mesh_dims(layout: FSDP2Layout, world_size: int) -> tuple[dict[str, int], dict[str, int] | None]:
    """Return the sizes of the mesh that ``components.engines.fsdp2.mesh.make_mesh`` creates, outermost first.

    The second dictionary has the sizes of the mesh of experts. None means that experts are not split.
    """
    replicate, cp, ep, tp = layout.dp_replicate, layout.cp, layout.ep, layout.tp
    dims = {"dp_replicate": replicate, "dp_shard": world_size // (replicate * cp * tp), "cp": cp, "tp": tp}
    experts = {"dp_replicate": replicate, "dp_shard": world_size // (replicate * ep * tp), "ep": ep, "tp": tp}
    return dims, experts if ep > 1 else None


def comm_cost(layout: FSDP2Layout, size: ModelSize, step: CommInputs) -> StepCost:
    """Estimate the communication of a step (Rajbhandari et al., 2020, section 7).

    The weights are gathered once, or, if blocks are resharded, by each micro-batch for its forward and its
    backward pass. Passes without gradient gather them once, unless micro-batches are not merged. Gradients
    are reduce-scattered in fp32, after the last micro-batch or after each one.
    """
    itemsize = step.dtype.itemsize
    shards = step.world_size // (layout.dp_replicate * layout.tp)
    held, trained = (size.parameters - size.quantized) / layout.tp, size.trained / layout.tp
    experts, taught = size.experts / layout.tp, size.trained_experts / layout.tp
    how, first = layout.activation_checkpointing, layout.recompute_num_layers
    recomputed = recomputed_share(how, first, [size.layers])
    modules = recomputed_modules(how, layout.recompute_modules)
    reductions = step.num_microbatches if layout.reduce_gradients == "every" else 1
    # The weights outside of blocks are kept from the forward pass to the backward pass.
    kept, number = size.outside_blocks / layout.tp, step.num_microbatches
    reshards, calls = layout.reshard_after_forward, step.forward_calls
    kept_gathers = (number if reshards else 1) + calls
    gathers = (2 * number if reshards else 1) + calls * (number if reshards and not step.merges else 1)

    def spread(whole: float, experts: float) -> float:
        """Return the elements sent to gather ``whole``, of which ``experts`` are also split over ep ranks."""
        return all_gather_bytes(whole - experts, shards) + all_gather_bytes(
            experts / layout.ep, shards // layout.ep
        )

    gathered = spread(held - kept, experts) * itemsize + all_gather_bytes(size.quantized_bytes, shards)
    if layout.fp8_all_gather:
        gathered -= all_gather_bytes(size.float8 * (itemsize - 1), shards)
    weights = gathers * gathered + kept_gathers * all_gather_bytes(kept, shards) * itemsize
    weights += reductions * spread(trained, taught) * FP32
    sent = [CommVolume("dp_shard", weights, when="overlapped")]
    if layout.dp_replicate > 1:
        copies = reductions * all_reduce_bytes(trained / shards * FP32, layout.dp_replicate)
        sent.append(CommVolume("dp_replicate", copies, when="overlapped"))
    sent += activation_volumes(layout, size, step, recomputed, modules)
    if step.whole_weights:
        sent += (v for v in whole_updates(layout, size, shards) if v.num_bytes)
    if layout.cpu_offload:
        loaded = gathers * ((held - kept) * itemsize + size.quantized_bytes) + kept_gathers * kept * itemsize
        shard = (loaded + reductions * trained * FP32) / shards
        sent.append(CommVolume("host", shard, when="overlapped"))
    # The last of the three products of a dense MLP is not needed either.
    return StepCost(sent, 0.0, recomputed, {name: 2 / 3 if name == "mlp" else 1.0 for name in modules})


def activation_volumes(
    layout: FSDP2Layout, size: ModelSize, step: CommInputs, recomputed: float, modules: Collection[str]
) -> Iterator[CommVolume]:
    """Estimate the bytes of hidden states, heads and tokens that the ranks of cp, tp and ep exchange.

    ``recomputed`` is the share of the blocks, and ``modules`` the parts of all blocks, that are recomputed.
    """
    tokens, itemsize = step.tokens / layout.cp, step.dtype.itemsize
    passes = 2 + recomputed + step.forward_passes  # forward, backward, recomputed, without gradient
    if layout.cp > 1:
        yield ulysses_volume(size, layout.cp, layout.tp, step.tokens, itemsize, passes=passes)
    if layout.tp > 1:
        # A recomputed block or MLP ends before its last all-reduce, whose result the backward pass does not
        # need. An MTP layer ends with a norm, and begins with a matrix, which has an all-reduce in each pass.
        # Experts are computed before the shared experts.
        yield tp_volume(
            size,
            layout.tp,
            tokens * size.hidden * itemsize,
            ends=1,
            repeated=2 * recomputed,
            forward_passes=step.forward_passes,
            repeated_mlps=size.num_moe_layers if "moe" in modules and size.has_shared_experts else 0,
            merges=4 + 4 * recomputed,
        )
    if layout.ep > 1:
        span = layout.ep * layout.tp
        exchanges = passes + ("moe" in modules)
        yield token_dispatch_volume(size, layout.ep, tokens, itemsize, passes=exchanges, span=span)


def whole_updates(layout: FSDP2Layout, size: ModelSize, shards: int) -> Iterator[CommVolume]:
    """Estimate the bytes of gathering gradients and values, and of broadcasting the updated weights.

    Every replica updates its own experts.
    """
    split, tp = layout.ranks_with_own_experts(size.num_experts, shards), layout.tp
    for whole, over, replicas in (
        (size.trained - size.trained_experts, shards, layout.dp_replicate),
        (size.trained_experts / split, shards // split, 1),
    ):
        copies = {"dp_shard": over, "tp": tp, "dp_replicate": replicas}
        joint = [name for name, ranks in copies.items() if ranks > 1]
        ranks = over * tp * replicas
        yield CommVolume("dp_shard", 2 * FP32 * all_gather_bytes(whole / tp, over), when="at_end")
        yield CommVolume("tp", 2 * FP32 * all_gather_bytes(whole, tp), when="at_end")
        sent = FP32 * all_gather_bytes(whole, ranks)
        yield CommVolume(joint[0] if len(joint) == 1 else "all", sent, when="at_end", span=ranks)


def memory_savers(layout: FSDP2Layout, world_size: int) -> list[Json]:
    """Return changes of keys that may save memory, first those that keep the number of ranks."""
    dp = layout.dp_size(world_size)
    found = recompute_more(
        layout.activation_checkpointing, layout.recompute_modules, layout.recompute_num_layers
    )
    if not layout.reshard_after_forward:
        found.append({"reshard_after_forward": True})
    if layout.prefetch_groups is not None or layout.blocks_per_group > 1:
        found.append({"prefetch_groups": None, "blocks_per_group": 1})
    if layout.reduce_gradients == "last":
        found.append({"reduce_gradients": "every"})
    if layout.dp_replicate > 1:
        found.append({"dp_replicate": 1})
    if not layout.cpu_offload:
        found.append({"cpu_offload": True})
    found.append({"ep": 2 * layout.ep})
    for key in ("tp", "cp"):
        size = getattr(layout, key) * 2
        if dp % 2 == 0:
            found.append({key: size, "dp": dp // 2})
        found.append({key: size, "dp": dp})
    found += [{"dp": dp * times} for times in (2, 4, 8)]
    return [keys for keys in found if shares_experts(vars(layout) | {"dp": dp} | keys)]


def shares_experts(keys: Config) -> bool:
    """Return whether ep divides the number of ranks that shard a parameter."""
    return bool((keys["dp"] // keys["dp_replicate"] * keys["cp"]) % keys["ep"] == 0)


def enumerate_layouts(devices: int, per_node: int, *, experts: int = 0) -> Iterator[Config]:
    """Yield the keys of every layout of ``devices`` ranks, with tensor parallelism only within a node.

    ``experts`` is the number of experts of a layer, 0 without any.
    """
    for tp in divisors(devices):
        if tp > per_node:
            continue
        for cp in divisors(devices // tp):
            dp = devices // (tp * cp)
            nodes = -(-devices // per_node)
            copies = {1, nodes} if dp % nodes == 0 else {1}
            yield from (
                {"dp": dp, "dp_replicate": n, "cp": cp, "tp": tp, "ep": ep}
                for n in sorted(copies)
                for ep in divisors(gcd(experts, dp // n * cp) if experts else 1)
            )
