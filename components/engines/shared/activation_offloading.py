"""Offloading of decoder blocks' activations to host memory between forward and backward pass.

Hooks (``torch.autograd.graph.saved_tensors_hooks``) receive every tensor that autograd saves; no operator may
change such a tensor in place afterwards. On a GPU, a second stream copies the tensors of a block to pinned
host memory during the forward pass of the following block, and back to the GPU during the backward pass of
that following block. The host never waits for the device here. On a CPU, the copies are the tensors
themselves.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from components.engines.shared.torch_private import storage_key

MIN_BYTES = 1024
"""Smaller tensors stay on the device, because copying them takes time and saves little memory."""


@dataclass(eq=False)
class Saved:
    """The storage of tensors that autograd has saved, as a vector.

    The object exists as long as the autograd graph refers to it.
    """

    group: "Group"
    host: Tensor
    device: Tensor | None
    """The storage on the device. None means that only the copy in host memory exists."""


@dataclass(eq=False)
class Group:
    """The activations of one block for one micro-batch."""

    previous: "weakref.ref[Group] | None"
    """A weak reference to the group of the preceding block, which is the next one in the backward pass. None
    means that this is the first block."""
    members: "list[weakref.ref[Saved]]" = field(default_factory=list)
    copied: Any = None
    """Event that is recorded after the copies to host memory."""
    fetched: Any = None
    """Event that is recorded after the copies back to the device."""

    def alive(self) -> list[Saved]:
        return [saved for member in self.members if (saved := member()) is not None]


class View(NamedTuple):
    """A tensor in a saved storage."""

    saved: Saved
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffloading:
    """Offloading of the activations of one or more models on ``device``; ``apply`` adds one model."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.handle = device, torch.get_device_module(device)
        self.copies = self.handle.Stream()
        self.saving = False
        self.parameters: set[int] = set()
        """Storages of parameters, which are not copied."""
        self.current: Group | None = None
        self.last: Group | None = None
        """The group before ``current``, which stays on the device while its copies overlap with the
        computation of ``current``."""
        self.seen: dict[object, Saved] = {}
        """Storages in ``current`` by number and dtype, because several operators may save views of one."""

    def apply(self, model: nn.Module, blocks: Iterable[nn.Module], others: Iterable[nn.Module] = ()) -> None:
        """Offload the tensors that autograd saves in ``model`` from the first of its ``blocks`` on.

        Parameters are not offloaded. The parameters of ``blocks`` and of the modules ``others`` may have new
        storage in each call, because FSDP gathers them.
        """
        forward = model.forward

        def saving(*args: object, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.saving, self.parameters = True, storages(model)
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return forward(*args, **kwargs)
            finally:
                self._begin(None)
                self.saving = False

        model.forward = saving
        for module in (*others, *blocks):
            module.register_forward_pre_hook(self._add_parameters)
        for block in blocks:
            block.register_forward_pre_hook(self._begin_block)

    def finish(self) -> None:
        """Make later work on the device wait for all copies, after a backward pass was interrupted."""
        self._computing().wait_stream(self.copies)

    def _add_parameters(self, module: nn.Module, _inputs: object) -> None:
        if self.saving:
            self.parameters |= storages(module)

    def _begin_block(self, _block: nn.Module, _inputs: object) -> None:
        if self.saving:  # not in a block that is recomputed in the backward pass
            self._begin(Group(None if self.current is None else weakref.ref(self.current)))

    def _begin(self, group: Group | None) -> None:
        """End the current group, free the device memory of the one before it, and begin ``group``."""
        if self.last is not None:
            self._computing().wait_event(self.last.copied)
            for saved in self.last.alive():
                saved.device = None
        if self.current is not None:
            self.current.copied = self.copies.record_event()
        self.last, self.current = self.current, group
        self.seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor | View:
        kept = tensor.detach()  # a saved result would form a reference cycle with its graph node
        if self.current is None or tensor.device.type != self.device.type:
            return kept
        if is_traceable_wrapper_subclass(tensor):  # its own storage holds nothing
            return kept
        storage = tensor.untyped_storage()
        if storage_key(tensor) in self.parameters or storage.nbytes() < MIN_BYTES:
            return kept
        if tensor.dtype in (torch.int32, torch.int64):  # indices and hashes, which are small or shared
            return kept
        key = (storage_key(tensor), tensor.dtype)
        if key not in self.seen:
            vector = kept.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            self.copies.wait_stream(self._computing())
            with self.handle.stream(self.copies):
                host = vector.to("cpu", non_blocking=True)  # pinned
            self.seen[key] = Saved(self.current, host, vector)
            self.current.members.append(weakref.ref(self.seen[key]))
        # The strides are kept, because kernels may round differently with others.
        return View(self.seen[key], tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved = packed.saved
        group = saved.group
        before = None if group.previous is None else group.previous()
        self._fetch(group)
        if group.fetched is not None:
            self._computing().wait_event(group.fetched)
        if before is not None:
            self._fetch(before)
        assert saved.device is not None
        return saved.device.as_strided(packed.shape, packed.stride, packed.offset)

    def _fetch(self, group: Group) -> None:
        """Begin to copy back to the device those tensors of ``group`` that are still needed and not on it."""
        absent = [saved for saved in group.alive() if saved.device is None]
        if not absent:
            return
        cpu = self.device.type == "cpu"
        back = [s.host if cpu else torch.empty_like(s.host, device=self.device) for s in absent]
        self.copies.wait_stream(self._computing())  # its earlier work may use the same memory
        with self.handle.stream(self.copies):
            for saved, target in zip(absent, back, strict=True):
                saved.device = target.copy_(saved.host, non_blocking=True)
        group.fetched = self.copies.record_event()

    def _computing(self) -> torch.Stream:
        return self.handle.current_stream()


def storages(module: nn.Module) -> set[int]:
    return {storage_key(parameter) for parameter in module.parameters()}
