"""LoRA around Megatron's parallel layers, trained as an adapter of the Hugging Face model.

A layer computes ``W x + scaling * B A x`` (LoRA, https://arxiv.org/abs/2106.09685, section 4.1). Megatron's
fused layers hold several Hugging Face layers, each of which has its own A and B, or none.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from components.adapters import LoRA
from components.adapters.lora_config import initial_name
from components.engines.megatron.runtime.dropout_hashes import InputHashes
from components.engines.megatron.runtime.hf_weights import HFTensorSlice, HFTensorSlices
from components.engines.megatron.runtime.mla import WholeLinear
from components.engines.shared.adapter_dropout import channel_hashes, drop

ADAPTED = ColumnParallelLinear | RowParallelLinear | WholeLinear


class AdaptedLinear(nn.Module):
    """A parallel layer ``base`` that adds the adapters' outputs to those of its Hugging Face layers.

    Column parallel: A ``[r, in]`` is replicated over tp, and B ``[out, r]`` is split by rows like the output.
    The gradient of the product of width r is summed over tp ranks.
    Row parallel: A is split by columns like the input, and B is replicated. The product of width r is summed
    over tp ranks.
    Replicated: A and B are replicated too, and nothing is communicated. This includes layers of experts,
    which ``check_lora`` requires to be unsplit and whose tokens are already on their rank. Gradients are
    summed over the ranks that hold the same expert.
    With PiSSA, the lists of factors contain the trained ones and then the frozen initial ones of all
    members, in fp32, whose outputs are subtracted.
    With sequence parallelism the replicated factor processes only this rank's positions, and Megatron's
    ``finalize_model_grads`` sums its gradient.
    """

    def __init__(
        self, base: Any, members: Sequence[HFTensorSlice], adapter: LoRA, hashes: InputHashes
    ) -> None:
        """Wrap ``base``; ``members`` are the adapted slices of ``base.weight``, in the order of its rows.

        ``hashes`` are those of the chunk that ``base`` belongs to.
        """
        super().__init__()
        self.base, self.members, self.scaling, self.dropout = base, members, adapter.scaling, adapter.dropout
        self.expert = members[0].expert
        self.group, self.sequence_parallel = base.tp_group, base.sequence_parallel and not self.expert
        self.whole = isinstance(base, WholeLinear) or self.expert
        self.column = isinstance(base, ColumnParallelLinear) and not self.whole
        self._disable_adapters = False  # the name in peft
        self.hashes = hashes.rows if self.row else hashes.split
        self.channels: list[Tensor] = []
        """``channel_hashes`` of each member's input, if there is dropout."""
        for member in members if self.dropout else ():
            columns = member.index[1]
            channels = range(columns.start, columns.stop)
            name = member.name.removesuffix(".weight")
            self.channels.append(channel_hashes(name, channels, base.weight.device))
        self.down: list[nn.Parameter] = []
        self.up: list[nn.Parameter] = []
        for kind in ("lora", "initial") if adapter.is_pissa else ("lora",):
            for number, member in enumerate(members):
                rows, columns = (index.stop - index.start for index in member.index)
                a, b = (adapter.r, columns), (rows, adapter.r)
                self.down.append(self._factor(f"{kind}_A_{number}", a, split=1 if self.row else None))
                self.up.append(self._factor(f"{kind}_B_{number}", b, split=0 if self.column else None))

    @property
    def row(self) -> bool:
        return not self.column and not self.whole

    def _factor(self, name: str, shape: tuple[int, int], split: int | None) -> nn.Parameter:
        """Register a factor in this module itself, so that Megatron gathers it before each call.

        ``shape`` is that of this rank's part, and ``split`` the dimension that tp ranks split. None means
        that every tp rank has the full factor.
        """
        parameter = nn.Parameter(self.base.weight.new_empty(shape), requires_grad=name.startswith("lora"))
        if self.expert:  # tp ranks hold different experts, so the gradient norm counts each rank's
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif split is None:
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(parameter, True, split, 1)
        parameter.allreduce = not self.expert  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)
        return parameter

    def blocks(self) -> HFTensorSlices:
        """Return the Hugging Face tensor of each factor, under its name in the adapter."""
        found: HFTensorSlices = {}
        for number, (a, b) in enumerate(zip(self.down, self.up, strict=True)):
            member = self.members[number % len(self.members)]
            module = member.name.removesuffix(".weight")
            (out_rows, in_columns), rank = member.index, slice(0, len(a))
            shapes = torch.Size([len(a), member.shape[1]]), torch.Size([member.shape[0], len(a)])
            dims = (1 if member.dim == 1 else None), (0 if member.dim == 0 else None)
            for parameter, letter, shape, index, dim in (
                (a, "A", shapes[0], (rank, in_columns), dims[0]),
                (b, "B", shapes[1], (out_rows, rank), dims[1]),
            ):
                name = f"{module}.lora_{letter}.weight"
                name = name if parameter.requires_grad else initial_name(name)
                found[parameter] = [
                    HFTensorSlice(
                        name, shape, index, dim, 1, 0, len(parameter), primary=True, expert=self.expert
                    )
                ]
        return found

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map ``[s, b, in]`` to ``[s, b, out]`` (this rank's shares) and a bias to be added later."""
        out, bias = self.base(hidden)
        return (out if self._disable_adapters else self._add(out, self._narrow(hidden))), bias

    def _narrow(self, hidden: Tensor) -> Tensor:
        """Return ``scaling * A x`` of all adapters, concatenated, for the positions of ``base``'s output."""
        products = [
            F.linear(self._dropped(hidden, number), self.down[number]) for number in range(len(self.members))
        ]
        products += [F.linear(hidden, a.to(hidden.dtype)) for a in self.down[len(self.members) :]]
        narrow = self.scaling * torch.cat(products, -1)
        if self.whole:
            return narrow
        if self.column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, group=self.group)
        if self.column:
            return copy_to_tensor_model_parallel_region(narrow, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self.group)

    def _add(self, out: Tensor, narrow: Tensor) -> Tensor:
        """Add B times each adapter's part of ``narrow`` to its layer's rows in ``out``.

        ``out`` is the output of ``base``, which is overwritten unless ``base`` is row-parallel.
        """
        # The sum over tp ranks in these layers returns its argument itself, and autograd does not allow such
        # a result to be changed in place.
        out = out.clone() if isinstance(self.base, RowParallelLinear) else out
        ups = [b.to(narrow.dtype) for b in self.up]
        total: Tensor = AddProducts.apply(out, narrow, self.members, *ups)
        return total

    def _dropped(self, hidden: Tensor, member: int) -> Tensor:
        """Return the input of a member's A."""
        if not self.training or not self.dropout:
            return hidden
        return drop(hidden, self.hashes, self.channels[member], self.dropout)


class AddProducts(torch.autograd.Function):
    """Add the adapters' outputs to the output of a fused layer, in place.

    A member is one of the Hugging Face layers that the fused layer holds. If its rows are interleaved with
    those of others, as in query, key and value, a pass copies the rows of one member at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, narrow: Tensor, members: Sequence[HFTensorSlice], *ups: Tensor
    ) -> Tensor:
        """Add to each member's rows of ``out`` its B times its part of ``narrow``, and return ``out``.

        Args:
            out: ``[..., out]``, overwritten.
            narrow: ``[..., k r]``, the inputs of the k matrices B.
            ups: the k matrices B ``[rows, r]``, one of each member, and then, with PiSSA, the initial one of
                each. The differences of their products are added, which are exactly 0 at first.
        """
        ctx.mark_dirty(out)
        ctx.members = members
        ctx.save_for_backward(narrow, *ups)
        factors = list(zip(narrow.split(ups[0].shape[1], -1), ups, strict=True))
        trained, initial = factors[: len(members)], factors[len(members) :]
        for number, member in enumerate(members):
            product = F.linear(*trained[number])
            if initial:
                product -= F.linear(*initial[number])
            rows_of(out, member).add_(product.unflatten(-1, (member.groups, -1)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        narrow, *ups = ctx.saved_tensors
        of_narrow: list[Tensor] = []
        of_ups: list[Tensor | None] = []
        for number, (part, b) in enumerate(zip(narrow.split(ups[0].shape[1], -1), ups, strict=True)):
            rows = rows_of(gradient, ctx.members[number % len(ctx.members)]).flatten(-2)
            is_initial = number >= len(ctx.members)
            of_narrow.append(-(rows @ b) if is_initial else rows @ b)
            of_ups.append(None if is_initial else rows.flatten(0, -2).T @ part.flatten(0, -2))
        return gradient, torch.cat(of_narrow, -1), None, *of_ups


def rows_of(out: Tensor, member: HFTensorSlice) -> Tensor:
    """Return the rows of a member, ``[..., groups, rows per group]``, as a view of ``out``."""
    return out.unflatten(-1, (member.groups, -1))[..., member.start : member.stop]


def adapt(
    chunk: nn.Module, found: HFTensorSlices, adapter: LoRA, targets: Collection[str], hashes: InputHashes
) -> HFTensorSlices:
    """Wrap the layers of ``chunk`` that hold ``targets`` (Hugging Face layers); return the added parameters.

    ``hashes`` are those of ``chunk``. Call this function after ``hf_slices``, which needs Megatron's own
    names. The added parameters are uninitialised.
    """
    added: HFTensorSlices = {}
    for parent in list(chunk.modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, ADAPTED) or layer.weight not in found:
                continue
            members = [m for m in found[layer.weight] if m.name.removesuffix(".weight") in targets]
            if members:
                wrapped = AdaptedLinear(layer, members, adapter, hashes)
                setattr(parent, name, wrapped)
                added |= wrapped.blocks()
    return added
