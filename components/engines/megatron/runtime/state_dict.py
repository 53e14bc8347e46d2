"""The tensors of a checkpoint, under names that are the same for every engine and layout."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from components.checkpoint.dcp import load_tensors, saved_sizes
from components.checkpoint.flat_shard import FlatShard
from components.checkpoint.reader import StoredTensors
from components.engines.megatron.runtime.hf_weights import (
    HFTensorSlice,
    HFTensorSlices,
    TPMeshes,
    as_dtensor,
    fill_parameters,
    replicas,
)
from components.engines.megatron.runtime.optimizer import DenseOrExpertOptimizer, MegatronOptimizers
from components.engines.megatron.runtime.whole_weights import WholeWeightUpdate
from components.engines.shared.class_state import UPDATES

LOAD_BYTES = 1 << 30
"""Maximum size in bytes of tensors that are read at once, in host memory."""

LOAD_SHARE = 1 / 20
"""Maximum share of a rank's state that is read at once: while it is read, parts of fused layers exist
twice."""

Piece = tuple[nn.Parameter, str]
"""A parameter and the kind of its state: ``model`` or the name of a moment."""
Update = MegatronOptimizers | WholeWeightUpdate
"""The optimizer of an engine."""


def saved_tensors(
    blocks: HFTensorSlices,
    stored: HFTensorSlices,
    update: Update,
    device: torch.device,
    *,
    model_only: bool,
) -> dict[str, Tensor]:
    """Return the tensors that this rank writes, only weights if ``model_only``, without communication.

    ``stored`` holds the parameters without optimizer state, such as router biases.
    """
    if isinstance(update, WholeWeightUpdate):
        tensors = update.masters(written=True) | ({} if model_only else update.tensors())
    else:
        tensors = optimizer_tensors(blocks, update, model_only=model_only)
    if not model_only:
        tensors |= random_states(device, dist.get_rank())
    for parameter, members in stored.items():
        if replicas(parameter).rank() == 0:
            tensors |= parts_on_disk("model", parameter.detach(), members, TPMeshes("cpu"))
    return tensors


def optimizer_tensors(
    blocks: HFTensorSlices, update: MegatronOptimizers, *, model_only: bool
) -> dict[str, Tensor]:
    """Return the weights, the moments and the update count that this rank writes, by checkpoint key.

    With ``model_only``, only the weights are returned.

    With the distributed optimizer, each of the ranks that hold the same parameters writes its own range.
    Without it, the parameters are dealt out to these ranks, and each rank writes full parameters from host
    memory. Together they write one copy.
    """
    meshes, kinds, tensors = TPMeshes("cpu"), ["model"], dict[str, Tensor]()
    if not model_only:
        update.make_moments()
        kinds += update.moments
        if blocks:  # a pipeline stage may have no trained parameter, and so no count
            tensors[UPDATES] = torch.tensor([update.step], dtype=torch.float32)
    for number, (parameter, members) in enumerate(blocks.items()):
        of = update.of(parameter)
        if of.distributed:
            tensors |= flat_shards(parameter, members, of, kinds, meshes)
        elif number % of.replicas.size() == of.replicas.rank():
            for kind in kinds:
                tensors |= parts_on_disk(kind, update.read(parameter, kind), members, meshes)
    return tensors


def reference_tensors(kept: HFTensorSlices) -> dict[str, Tensor]:
    """Return the weights of the reference model that this rank writes, by checkpoint key.

    The parameters are dealt out to the ranks that hold them, so that together these write one copy.
    """
    meshes, tensors = TPMeshes("cpu"), dict[str, Tensor]()
    for number, (parameter, members) in enumerate(kept.items()):
        if number % replicas(parameter).size() == replicas(parameter).rank():
            tensors |= parts_on_disk("reference", parameter.detach(), members, meshes)
    return tensors


def parts_on_disk(
    kind: str, values: Tensor, members: Sequence[HFTensorSlice], meshes: TPMeshes
) -> dict[str, Tensor]:
    """Return the slices ``members`` of ``values`` in host memory, by checkpoint key ``kind/name``.

    ``values`` is a full state of one parameter. Slices that another pipeline stage writes are left out.
    """
    parts = ((member, member.read(values).contiguous().cpu()) for member in members if member.primary)
    return {f"{kind}/{member.name}": as_dtensor(member, part, meshes.of(member)) for member, part in parts}


def flat_shards(
    parameter: nn.Parameter,
    members: Sequence[HFTensorSlice],
    of: DenseOrExpertOptimizer,
    kinds: Sequence[str],
    meshes: TPMeshes,
) -> dict[str, Tensor]:
    """Return this rank's shard of ``parameter`` in the distributed optimizer, by key ``kind/name``.

    Each value is a ``FlatShard`` with the position of its elements in the full Hugging Face tensor. Only the
    first tp rank (for experts, the first etp rank) returns replicated tensors, and no rank returns the second
    copy of a tied tensor.
    """
    found = of.shard(parameter)
    if found is None:
        return {}
    main, where = found
    shards: dict[str, Tensor] = {}
    for member in members:
        parts = list(member.flat_chunks(parameter.shape, where))
        if parts and member.primary and (meshes.first(member) or member.dim is not None):
            for kind in kinds:
                flat = of.values(main, kind).reshape(-1)
                shards[f"{kind}/{member.name}"] = FlatShard.of(flat, member.shape, parts)
    return shards


def load(
    path: Path,
    blocks: HFTensorSlices,
    stored: HFTensorSlices,
    update: Update,
    device: torch.device,
) -> None:
    """Restore the state from a checkpoint that any engine wrote on any number of ranks.

    All ranks of a tp group take the default random states of its first rank, as at the start of a run. A
    state whose rank did not exist when the checkpoint was written stays as it is.
    """
    saved, first = saved_sizes(path), parallel_state.get_tensor_model_parallel_src_rank()
    streams = {name: value for name, value in random_states(device, first).items() if name in saved}
    load_tensors(path, dict(streams))
    source = StoredTensors(path)
    fill_parameters(stored, lambda name, index=(): source.read(f"model/{name}", index))
    if isinstance(update, WholeWeightUpdate):
        with update.loading(saved) as tensors:
            load_tensors(path, tensors)
    else:
        load_optimizer(path, blocks, update)
    restore_rng(streams, device, first)


def load_optimizer(path: Path, blocks: HFTensorSlices, update: MegatronOptimizers) -> None:
    update.make_moments()
    step = torch.zeros(1)
    load_tensors(path, {UPDATES: step})
    load_states(path, blocks, update, {kind: kind for kind in ("model", *update.moments)}, update.shards)
    update.set_step(int(step.item()))


def load_weights(path: Path, blocks: HFTensorSlices, stored: HFTensorSlices, update: Update) -> None:
    """Load the weights to evaluate, without optimizer state and random states.

    They are the average of an optimizer such as schedule-free AdamW, or else the trained weights.
    """
    source = StoredTensors(path)
    kind = source.kind_to_evaluate
    fill_parameters(stored, lambda name, index=(): source.read(f"{kind}/{name}", index))
    load_states(path, blocks, update, {"model": kind})


def load_states(
    path: Path, blocks: HFTensorSlices, update: Update, kinds: Mapping[str, str], sharded_over: int = 1
) -> None:
    """Restore states of all parameters.

    ``kinds`` maps each kind of state to the kind of tensors in the checkpoint from which it is restored.
    ``sharded_over`` is the number of ranks that share the states.
    """
    kept = 4 * len(kinds) * sum(parameter.numel() for parameter in blocks)
    for some in load_batches(blocks, tuple(kinds), min(LOAD_BYTES, LOAD_SHARE * kept / sharded_over)):
        load_pieces(path, blocks, some, update, kinds)


def load_batches(blocks: HFTensorSlices, kinds: Sequence[str], limit: float) -> Iterator[list[Piece]]:
    """Yield each pair of a parameter of ``blocks`` and one of ``kinds``, in lists to load together.

    A list takes at most ``limit`` bytes in fp32. A parameter that is larger is in a list of its own.
    """
    some: list[Piece] = []
    size = 0
    for piece in ((parameter, kind) for parameter in blocks for kind in kinds):
        needed = 4 * piece[0].numel()
        if some and size + needed > limit:
            yield some
            some, size = [], 0
        some.append(piece)
        size += needed
    if some:
        yield some


def load_pieces(
    path: Path, blocks: HFTensorSlices, pieces: Sequence[Piece], update: Update, kinds: Mapping[str, str]
) -> None:
    meshes = TPMeshes("cpu")
    targets: dict[str, Tensor] = {}
    wholes: dict[Piece, Tensor] = {}
    copies: list[tuple[HFTensorSlice, Tensor, Tensor]] = []
    for parameter, kind in pieces:
        # Zeros, because a checkpoint does not contain the padding of the vocabulary.
        whole = wholes[parameter, kind] = torch.zeros(parameter.shape)
        for member in blocks[parameter]:
            part = member.read(whole).contiguous()
            targets[f"{kinds[kind]}/{member.name}"] = as_dtensor(member, part, meshes.of(member))
            copies.append((member, whole, part))
    load_tensors(path, targets, together=False)
    for member, whole, part in copies:
        member.write(whole, part)
    for (parameter, kind), whole in wholes.items():
        update.write(parameter, kind, whole)


def random_states(device: torch.device, default: int) -> dict[str, Tensor]:
    """Return this rank's current random states, by checkpoint key.

    The keys of the states of torch and of the GPU have the rank ``default``. The keys of the states of
    Megatron's tracker have this rank.
    """
    states = {f"rng/{default}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng_cuda/{default}"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {tracked_key(name, device): state for name, state in tracked.items()}


def tracked_key(name: str, device: torch.device) -> str:
    return f"rng_{device.type}_{name}/{dist.get_rank()}"


def restore_rng(streams: dict[str, Tensor], device: torch.device, default: int) -> None:
    """Set this rank's random states to ``streams``, whose keys are those of ``random_states``."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.set_states(
        {name: streams.get(tracked_key(name, device), state) for name, state in states.items()}
    )
    if f"rng/{default}" in streams:
        torch.set_rng_state(streams[f"rng/{default}"])
    if f"rng_cuda/{default}" in streams:
        torch.cuda.set_rng_state(streams[f"rng_cuda/{default}"])
