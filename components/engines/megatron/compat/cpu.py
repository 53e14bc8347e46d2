"""Patches for running megatron-core on the CPU, on gloo ranks of a machine without a GPU.

Patches affect the rest of the program as little as possible. Functions of ``torch.cuda``, which raise errors
or do nothing without a GPU, are replaced globally. Functions that the rest of the program uses, such as
``torch.zeros`` or ``Tensor.type``, are replaced only for Megatron's modules and functions.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.megatron.compat import cpu_moe, warnings
from components.engines.megatron.compat.patching import Patch, during
from components.engines.megatron.compat.patching import install as install_patches
from components.engines.shared import generated_kernels

CPU = torch.device("cpu")


@cache
def install() -> None:
    """Install the patches once per process, before megatron is used.

    With CUDA, only warnings are filtered, and functions are left uncompiled if they cannot be compiled.

    Raises:
        AttributeError: if this release of megatron-core lacks a patched symbol; the message names it.
    """
    warnings.install()
    on_gpu = torch.cuda.is_available()
    if not (on_gpu and generated_kernels.can_compile()):
        import_uncompiled()
    if not on_gpu:
        install_patches(PATCHES)


def import_uncompiled() -> None:
    """Import megatron.core with its small functions left uncompiled.

    Its modules pass some forty functions to torch.compile, which takes seconds in every process and needs
    compilers when one of them runs. ``megatron.core.jit`` keeps a reference to the replacement for modules
    that are imported later; for all other code torch.compile is unchanged.
    """
    during(torch, "compile", leave_eager)(import_module)("megatron.core.jit")


def leave_eager(_: object) -> Callable[..., object]:
    def compile(function: object = None, **_: object) -> object:
        return compile if function is None else function

    return compile


# ---- torch.cuda


def do_nothing(_: object) -> Callable[..., None]:
    return lambda *_, **__: None


def set_rng_state(_: object) -> Callable[..., None]:
    return lambda state, *_, **__: torch.set_rng_state(state)


# ---- Megatron's own


class CpuTorch:
    """A substitute for ``torch`` in one module of Megatron; tensors for device "cuda" are made on the CPU."""

    def __init__(self, _: object) -> None:
        self.tensor, self.zeros = on_cpu(torch.tensor), on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def name_cuda_type(original: Callable[..., object]) -> Callable[..., object]:
    def named(tensor: Tensor, *to: object) -> object:
        return original(tensor, *to) if to else str(original(tensor)).replace("torch.", "torch.cuda.", 1)

    return named


def chunks_of_rank(_: object) -> Callable[[Tensor, int, dist.ProcessGroup], Tensor]:
    def own_chunks(pos_emb: Tensor, seq_dim: int, cp_group: dist.ProcessGroup) -> Tensor:
        """Return chunks r and ``2 * cp - 1 - r`` of ``2 * cp``, along ``seq_dim``."""
        chunks = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
        return torch.cat([chunks[cp_group.rank()], chunks[-1 - cp_group.rank()]], dim=seq_dim)

    return own_chunks


PATCHES = (
    Patch(
        symbols=("torch.cuda.current_device",),
        why="raises; Megatron makes parameters, buffers and messages on this device",
        replace=lambda _: lambda: CPU,
    ),
    Patch(
        symbols=("torch.cuda.synchronize",),
        why="raises; follows every batched exchange between pipeline stages",
        replace=do_nothing,
    ),
    Patch(
        symbols=("torch.cuda.current_stream",),
        why="raises; asked for before every reduction of gradients",
        replace=do_nothing,
        versions=">=0.19",
    ),
    Patch(
        symbols=("torch.cuda.get_rng_state", "torch.cuda.random.get_rng_state"),
        why="raises; on the CPU dropout draws from the CPU's generator: trackers are to keep its state",
        replace=lambda _: lambda *_, **__: torch.get_rng_state(),
    ),
    Patch(
        symbols=("torch.cuda.set_rng_state",),
        why="puts the call off until CUDA is initialised, which is never; a checkpoint restores with it",
        replace=set_rng_state,
    ),
    Patch(
        symbols=("torch.cuda.manual_seed",),
        why="puts the call off likewise: every tracker would start from the same state",
        replace=lambda _: lambda seed: torch.default_generator.manual_seed(seed),
    ),
    Patch(
        symbols=("megatron.core.tensor_parallel.random._set_cuda_rng_state",),
        why="puts the call off likewise: a tracker would draw from the stream that it is to leave alone",
        replace=set_rng_state,
    ),
    Patch(
        symbols=(
            "megatron.core.optimizer.optimizer.torch",
            "megatron.core.pipeline_parallel.schedules.torch",
        ),
        why='makes small tensors with device="cuda"',
        replace=CpuTorch,
    ),
    Patch(
        symbols=(
            "megatron.core.models.common.language_module.language_module.LanguageModule"
            ".setup_embeddings_and_output_layer",
        ),
        why="moves tied embeddings with Tensor.cuda before the stages that share them agree on them",
        replace=during(Tensor, "cuda", lambda _: lambda tensor, *_, **__: tensor),
    ),
    Patch(
        symbols=("megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank",),
        why="indexes with a tensor in pinned memory, which only CUDA can pin",
        replace=chunks_of_rank,
    ),
    Patch(
        symbols=(
            "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params.__init__",
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.__init__",
        ),
        why="takes torch.cuda.FloatTensor and its kin alone, by Tensor.type",
        replace=during(Tensor, "type", name_cuda_type),
    ),
    *cpu_moe.PATCHES,
)
