"""Megatron's optimizers and the state that they keep for every parameter."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime.hf_weights import HFTensorSlices, is_expert
from components.engines.shared.loss_accumulator import clip, count_zeros, global_norm
from components.optimizers import SGD, AdamW, Optimizer, WeightOptions, make_moments, weight_options


def optimizer_config(description: Optimizer, layout: Layout, dtype: torch.dtype) -> OptimizerConfig:
    """Return Megatron's options, without clipping: the engine clips by its own norm, summed in float64."""
    assert isinstance(description, AdamW | SGD), "check_optimizer refuses others"
    if isinstance(description, SGD):
        kind: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": description.momentum}
    else:
        kind = {
            "optimizer": "adam",
            "adam_beta1": description.betas[0],
            "adam_beta2": description.betas[1],
            "adam_eps": description.eps,
        }
    return OptimizerConfig(
        **kind,
        lr=description.lr,
        weight_decay=description.weight_decay,
        clip_grad=0.0,
        bf16=dtype != torch.float32,  # with fp16, Megatron would scale and check all gradients once more
        params_dtype=dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=layout.gathers_during_forward(whole_updates=False),
        optimizer_cpu_offload=layout.optimizer_cpu_offload,
        optimizer_offload_fraction=1.0 if layout.optimizer_cpu_offload else 0.0,
    )


def group_overrides(
    description: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[ParamKey, dict[str, float]] | None:
    """Return the options of every parameter for Megatron's groups. None means Megatron's defaults."""
    if not description.groups:
        return None
    options = {p: weight_options(description, name, p.ndim) for p, name in names.items()}
    return {
        ParamKey(predicate=ParamPredicate(str(chosen), partial(has_options, options, chosen))): {
            "own_weight_decay": chosen.weight_decay,
            "lr_scale": chosen.lr_scale,
        }
        for chosen in set(options.values())
    }


def has_options(
    options: Mapping[nn.Parameter, WeightOptions], chosen: WeightOptions, parameter: nn.Parameter
) -> bool:
    return options[parameter] == chosen


@dataclass(frozen=True)
class DenseOrExpertOptimizer:
    """One of the optimizers that Megatron chains: that of dense parameters, or that of experts."""

    optimizer: MegatronOptimizer
    replicas: dist.ProcessGroup
    """The ranks that hold the same parameters, over which the distributed optimizer shards its state."""
    distributed: bool

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the reduced gradients over all ranks, a float64 scalar."""
        self.optimizer.prepare_grads()
        group = self.optimizer.get_grad_stats_parallel_group()
        return global_norm(self.counted(), group, torch.device(torch.cuda.current_device())).square()

    def counted(self) -> list[Tensor]:
        """Return this rank's gradients except copies that other ranks count (tp replicas, tied weights)."""
        renamed = getattr(self.optimizer, "get_grads_for_grad_norm", None)  # exists since megatron-core 0.19
        return renamed() if renamed else self.optimizer.get_main_grads_for_grad_norm()

    def apply(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        # In place: without Apex, Megatron's own function makes a scaled copy of every gradient.
        gradients = [p.grad for p in self.optimizer.get_parameters() if p.grad is not None]
        clip(gradients, grad_norm, max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step_with_ready_grads()

    def count_zeros(self) -> int:
        group = self.optimizer.get_grad_stats_parallel_group()
        return count_zeros(self.counted(), group, torch.device(torch.cuda.current_device()))

    def shard(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """Return the fp32 master weights that this rank updates, and their slice of the flat parameter.

        None means that other ranks update the whole parameter.
        """
        if not self.distributed:
            return getattr(parameter, "main_param", parameter), slice(0, parameter.numel())
        place = self.optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None  # other ranks update all of it
        group, order = place
        at = self.optimizer._get_model_param_range_map(parameter)["param"]
        return self.optimizer.optimizer.param_groups[group]["params"][order], slice(at.start, at.end)

    def values(self, main: Tensor, kind: str) -> Tensor:
        """Return the tensor of ``kind`` (``model`` or a moment) for the master weights ``main``.

        The optimizer step updates this tensor. With optimizer_cpu_offload it is in host memory, and for
        ``model`` it is a copy of ``main``.
        """
        stepped = main
        if isinstance(self.optimizer.optimizer, HybridDeviceOptimizer):
            stepped = self.optimizer.optimizer.param_to_inner_param[main]
        if kind == "model":
            return stepped.detach()
        (state,) = (inner.state[stepped] for inner in self.inner if stepped in inner.state)
        return state[kind]

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The optimizers of torch: one, except with optimizer_cpu_offload."""
        optimizer = self.optimizer.optimizer
        return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]

    @property
    def counts(self) -> list[Tensor]:
        """The number of updates so far, by AdamW for every parameter; SGD does not count."""
        states = (state for inner in self.inner for state in inner.state.values())
        return [state["step"] for state in states if "step" in state]


@dataclass(frozen=True)
class MegatronOptimizers:
    """The optimizers of one rank's parameters, with their state."""

    members: Mapping[bool, DenseOrExpertOptimizer]
    """The optimizers of dense parameters (False) and of experts (True), if they are trained."""
    moments: Sequence[str]

    @classmethod
    def build(
        cls,
        description: Optimizer,
        chunks: Sequence[DistributedDataParallel],
        layout: Layout,
        dtype: torch.dtype,
        blocks: HFTensorSlices,
    ) -> "MegatronOptimizers":
        """Build this rank's optimizers for the parameters ``blocks``; collective over all ranks."""
        config = optimizer_config(description, layout, dtype)
        # The names of a fused parameter have the same options.
        overrides = group_overrides(description, {p: members[0].name for p, members in blocks.items()})
        chained = get_megatron_optimizer(config, list(chunks), overrides, use_gloo_process_groups=False)
        groups = {False: chunks[0].dp_cp_group, True: chunks[0].expt_dp_group}
        members: dict[bool, DenseOrExpertOptimizer] = {}
        for optimizer in chained.chained_optimizers:
            if getattr(optimizer, "is_stub_optimizer", False):
                continue  # all its parameters are frozen, on every rank
            for group in optimizer.param_groups:  # only Megatron's scheduler sets weight decay
                usual = description.weight_decay * group["wd_mult"]
                group["weight_decay"] = group.get("own_weight_decay", usual)
                if isinstance(optimizer.optimizer, torch.optim.AdamW):  # otherwise it copies the moments
                    group["fused"] = True
            experts = optimizer.param_groups[0]["is_expert_parallel"]
            replicas, distributed = groups[experts], layout.distributed_optimizer
            members[experts] = DenseOrExpertOptimizer(optimizer, replicas, distributed)
        return cls(members, description.moments)

    # ---- one step

    def prepare(self) -> Tensor:
        """Pass the reduced gradients to the optimizers, and return their global L2 norm, a float64 scalar."""
        return torch.stack([member.squared_norm() for member in self.members.values()]).sum().sqrt()

    def apply(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        for member in self.members.values():
            member.apply(lr, grad_norm, max_grad_norm)

    def count_zeros(self) -> int:
        return sum(member.count_zeros() for member in self.members.values())

    def zero_grad(self) -> None:
        for member in self.members.values():
            member.optimizer.zero_grad()

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's part of the gradient. None means that other ranks count all of it."""
        member = self.of(parameter)
        found = member.shard(parameter)
        is_copy = not member.distributed and member.replicas.rank() != 0
        counted = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        return None if found is None or is_copy or not counted else found[0].grad

    # ---- the state of a parameter

    def of(self, parameter: nn.Parameter) -> DenseOrExpertOptimizer:
        return self.members[is_expert(parameter)]

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return a state of the parameter, fp32 and in its shape, on every rank that holds the parameter.

        ``kind`` is ``model`` (the master weights) or one of ``moments``. The result must not be written to.
        Collective over ``replicas`` if the state is sharded.
        """
        member = self.of(parameter)
        if not member.distributed:
            found = member.shard(parameter)
            assert found is not None, "every rank holds the whole parameter"
            return member.values(found[0], kind).view_as(parameter)
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        if (found := member.shard(parameter)) is not None:
            main, where = found
            whole.view(-1)[where] = member.values(main, kind).reshape(-1)
        dist.all_reduce(whole, group=member.replicas)
        return whole

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Store this rank's part of ``whole`` as the state ``kind`` of the parameter, as named in ``read``.

        The kind ``model`` (the master weights) also sets the parameter itself, in its own dtype.
        """
        member = self.of(parameter)
        if (found := member.shard(parameter)) is not None:
            main, where = found
            part = whole.reshape(-1)[where]
            for target in (member.values(main, kind), *([main.detach()] if kind == "model" else [])):
                target.copy_(part.view_as(target))
        if kind == "model":
            parameter.copy_(whole)

    @property
    def shards(self) -> int:
        """Maximum number of ranks over which the state of a parameter is sharded."""
        return max(m.replicas.size() if m.distributed else 1 for m in self.members.values())

    @contextmanager
    def allocated_state(self) -> Iterator[None]:
        """Create missing moments, which are zero before the first update; they remain after the context."""
        self.make_moments()
        yield

    def make_moments(self) -> None:
        for member in self.members.values():
            for inner in member.inner:
                make_moments(inner, self.moments)

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return max((int(count) for member in self.members.values() for count in member.counts), default=0)

    def set_step(self, count: int) -> None:
        for member in self.members.values():
            for kept in member.counts:
                kept.fill_(count)
