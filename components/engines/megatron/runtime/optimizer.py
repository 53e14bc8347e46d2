"""Megatron's optimizers, and what they keep for every parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, nn

from components.engines.megatron.layout import Layout
from components.engines.norm import global_norm
from components.optimizers import AdamW, Optimizer, make_moments


def optimizer_config(description: Optimizer, layout: Layout, dtype: torch.dtype) -> OptimizerConfig:
    """Clipping is left to the engine, whose norm is a sum in float64."""
    kind = (
        {
            "optimizer": "adam",
            "adam_beta1": description.betas[0],
            "adam_beta2": description.betas[1],
            "adam_eps": description.eps,
        }
        if isinstance(description, AdamW)
        else {"optimizer": "sgd", "sgd_momentum": description.momentum}
    )
    return OptimizerConfig(
        **kind,
        lr=description.lr,
        weight_decay=description.weight_decay,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
        optimizer_cpu_offload=layout.optimizer_cpu_offload,
        optimizer_offload_fraction=1.0 if layout.optimizer_cpu_offload else 0.0,
    )


@dataclass(frozen=True)
class Update:
    """The update of one rank's parameters, and all that survives from one step to the next."""

    optimizer: MegatronOptimizer
    """The one that Megatron chained; dense models have no second."""
    moments: Sequence[str]
    dp_cp: dist.ProcessGroup
    """The ranks that the distributed optimizer shards over."""
    distributed: bool

    @classmethod
    def build(
        cls,
        description: Optimizer,
        chunks: Sequence[DistributedDataParallel],
        layout: Layout,
        dtype: torch.dtype,
    ) -> "Update":
        """Collective: every rank builds its own together."""
        config = optimizer_config(description, layout, dtype)
        chained = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        (optimizer,) = chained.chained_optimizers
        for group in optimizer.param_groups:  # Megatron leaves this to its own scheduler
            group["weight_decay"] = description.weight_decay * group["wd_mult"]
        return cls(optimizer, description.moments, chunks[0].dp_cp_group, layout.distributed_optimizer)

    # ---- one step

    def prepare(self) -> Tensor:
        """Hands the reduced gradients to the optimizer; their L2 norm over every rank, float64 scalar."""
        self.optimizer.prepare_grads()
        group = self.optimizer.get_grad_stats_parallel_group()
        return global_norm(self.counted_gradients(), group, torch.device(torch.cuda.current_device()))

    def counted_gradients(self) -> list[Tensor]:
        """This rank's gradients but for those that another rank counts: replicas of TP, tied weights."""
        renamed = getattr(self.optimizer, "get_grads_for_grad_norm", None)  # since megatron-core 0.19
        return renamed() if renamed else self.optimizer.get_main_grads_for_grad_norm()

    def apply(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        if max_grad_norm:
            clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), max_grad_norm, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()

    def count_zeros(self) -> int:
        device = torch.cuda.current_device()
        zeros = torch.zeros((), dtype=torch.int64, device=device)
        for gradient in self.counted_gradients():
            zeros += (gradient == 0).sum()
        dist.all_reduce(zeros, group=self.optimizer.get_grad_stats_parallel_group())
        return int(zeros.item())

    # ---- what is kept for a parameter

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """fp32, of the parameter's shape, on every rank of dp x cp (collective where it is sharded).

        ``kind`` is ``model`` (the main parameter) or one of ``moments``. Not to be written to.
        """
        if not self.distributed:
            found = self.shard(parameter)
            assert found is not None, "every rank holds the whole parameter"
            return self.values(found[0], kind).view_as(parameter)
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        if (found := self.shard(parameter)) is not None:
            main, where = found
            whole.view(-1)[where] = self.values(main, kind).reshape(-1)
        dist.all_reduce(whole, group=self.dp_cp)
        return whole

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Keeps this rank's part of ``whole``; ``model`` goes to the parameter itself too, in its dtype."""
        if (found := self.shard(parameter)) is not None:
            main, where = found
            part = whole.reshape(-1)[where]
            for target in (self.values(main, kind), *([main.detach()] if kind == "model" else [])):
                target.copy_(part.view_as(target))
        if kind == "model":
            parameter.copy_(whole)

    def shard(self, parameter: nn.Parameter) -> tuple[Tensor, slice] | None:
        """The fp32 main parameter that this rank updates, and where it lies in the flattened parameter."""
        if not self.distributed:
            return getattr(parameter, "main_param", parameter), slice(0, parameter.numel())
        place = self.optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None  # all of it is updated by other ranks
        group, order = place
        at = self.optimizer._get_model_param_range_map(parameter)["param"]
        return self.optimizer.optimizer.param_groups[group]["params"][order], slice(at.start, at.end)

    def values(self, main: Tensor, kind: str) -> Tensor:
        """Where the step reads and writes: with optimizer_cpu_offload a copy in host memory."""
        stepped = main
        if isinstance(self.optimizer.optimizer, HybridDeviceOptimizer):
            stepped = self.optimizer.optimizer.param_to_inner_param[main]
        if kind == "model":
            return stepped.detach()
        (state,) = (inner.state[stepped] for inner in self.inner if stepped in inner.state)
        return state[kind]

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """torch's optimizers (or transformer-engine's), one but for optimizer_cpu_offload."""
        optimizer = self.optimizer.optimizer
        return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]

    def make_moments(self) -> None:
        for inner in self.inner:
            make_moments(inner, self.moments)

    @property
    def step(self) -> int:
        """Updates made so far. torch's AdamW counts them for every parameter, fused ones for a group."""
        inner = self.inner[0]
        if isinstance(inner, torch.optim.AdamW):
            return max((int(state["step"]) for state in inner.state.values()), default=0)
        return max(int(group.get("step", 0)) for group in inner.param_groups)

    def set_step(self, count: int) -> None:
        for inner in self.inner:
            if isinstance(inner, torch.optim.AdamW):
                for state in inner.state.values():
                    state["step"].fill_(count)
            else:
                for group in inner.param_groups:
                    group["step"] = count
