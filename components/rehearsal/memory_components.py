"""The components of the live memory of a rehearsed rank, which have the names of the estimate's parts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.optim import Optimizer

from components.contracts.hook import Hook
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.mesh import local_shard
from components.rehearsal.host_values import Arguments, tensors_of
from components.rehearsal.live_memory import Held, LiveMemory

INSIDE = ("reference", "forward", "backward")
"""The moments of a step in which micro-batches are computed."""
OF_FILES = {
    "_fully_shard/_fsdp_param.py": "gathered",
    "_fully_shard/_fsdp_collectives.py": "buffers",
    "components/engines/fsdp2/mesh.py": "gathered",
    "components/engines/megatron/runtime/hf_weights.py": "gathered",
}
"""Part of the line that allocates a storage -> use of the storage."""
HEAD = "components/engines/shared/token_log_probs.py"
OF_HEAD = {"aten::zeros_like": "gradients", "aten::new_empty": "logits"}
"""Operator with which ``HEAD`` allocates -> use of the result."""


def component(held: Held) -> str:
    """Return the use of a storage: the one that was set, or that of what its line and moment allocate."""
    if held.component:
        return held.component
    of_moment = "activations" if held.moment in INSIDE else "buffers"
    return next((use for part, use in OF_FILES.items() if part in held.line), of_moment)


def bytes_by_component(memory: LiveMemory) -> Counter[str]:
    """Return the bytes at the peak by component; their sum is the peak."""
    found: Counter[str] = Counter()
    for held, size in memory.at_peak().items():
        found[component(held)] += size
    return found


def follow(memory: LiveMemory, func: OpOverload, args: Arguments, out: object) -> None:
    """Set the use of the storages of gathered weights, gradients and logits from an operator on them."""
    name = func._schema.name
    if name == "fsdp::all_gather_copy_in":
        memory.assign([args[1]], "gathered")
    elif name == "fsdp::chunk_cat":  # to the buffer of a reduction
        memory.assign(args[0], "gradients")
    elif name == "aten::add_" and isinstance(args[1], Tensor):
        held = memory.held(args[0])
        # Until their reduction, gradients that FSDP accumulates look like gathered weights.
        if held is not None and component(held) in ("gradients", "gathered"):
            memory.assign(args[:2], "gradients")
    elif name in OF_HEAD and isinstance(out, Tensor):
        held = memory.held(out)
        if held is not None and held.line.startswith(HEAD):
            held.component = OF_HEAD[name]


def assign_state(memory: LiveMemory, engine: Any, hooks: Sequence[Hook]) -> None:
    """Set the use of the weights, gradients and optimizer state that ``engine`` and ``hooks`` hold now."""
    for optimizer in optimizers(engine):
        # Those that are not master weights are among the weights below.
        memory.assign(chain.from_iterable(group["params"] for group in optimizer.param_groups), "masters")
        memory.assign(tensors_of(chain.from_iterable(map(dict.values, optimizer.state.values()))), "moments")
    for hook in hooks:
        memory.assign(map(local_shard, hook.tensors().values()), "averages")
    trained = [engine.scorer] if isinstance(engine, FSDP2Engine) else engine.chunks
    frozen = [engine.reference] if isinstance(engine.reference, nn.Module) else engine.reference or []
    for name, models in (("weights", trained), ("reference", frozen)):
        for model in models:
            buffers = nn.Module.buffers(model)  # Megatron's wrapper has a list of this name
            memory.assign(map(local_shard, chain(model.parameters(), buffers)), name)
    memory.assign(gradients(trained), "gradients")


def optimizers(engine: Any) -> Iterable[Optimizer]:
    """Return torch's optimizers of ``engine``: none on a rank that owns no full weight."""
    update = engine.optimizer if isinstance(engine, FSDP2Engine) else engine.update
    if not hasattr(update, "members"):
        return filter(None, [update.optimizer])
    members = update.members.values()
    return (each for member in members for each in (member.optimizer.optimizer, *member.inner))


def gradients(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the gradients of all parameters; Megatron keeps them in ``main_grad``."""
    for parameter in chain.from_iterable(model.parameters() for model in models):
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            yield local_shard(gradient)
