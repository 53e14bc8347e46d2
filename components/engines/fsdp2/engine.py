"""The FSDP2 engine: sharded weights, one reduction a step, sums divided once."""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.adapters import LoRA, export_adapter
from components.engines import bins, process_group
from components.engines.fsdp2 import state
from components.engines.fsdp2.adapter import without_adapter
from components.engines.fsdp2.context import Context
from components.engines.fsdp2.experts import bias_buffers, grouped_experts
from components.engines.fsdp2.iteration import discard_iteration, fsdp_modules, release
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.mesh import (
    CONTEXT,
    REPLICATE,
    SHARD,
    described,
    forget_meshes,
    make_mesh,
    primary,
    stored,
    whole,
)
from components.engines.fsdp2.parallelize import Scorer, build_scorer
from components.engines.further import with_further
from components.engines.norm import global_norm
from components.engines.sums import Sums, add_up, largest, reduce_counts
from components.memory import naming_microbatch
from components.models import ModelSpec, export_folder
from components.models.experts import stored_dtype
from components.optimizers import Optimizer, torch_optimizer
from runner.protocols import Batch, Kernels, Loss, Reference, StepResult, TokenStats


class FSDP2Engine:
    """Implements ``runner.protocols.Engine`` over ``torch.distributed.fsdp.fully_shard``.

    Every rank builds it together, inside a process group. Weights come from ``model`` by their Hugging Face
    names. A reference (``frozen``) is a second copy of the initial weights or ``reference_model``, or the
    model without its adapter (``adapter_off``). ``weights`` are those that are trained: others take no
    gradient and no moments, and are in no checkpoint.
    """

    def __init__(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        layout: FSDP2Layout,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        reference: Reference = "none",
        reference_model: ModelSpec | None = None,
        count_zeros: bool = False,
        compiled: bool = False,
        kernels: Kernels = "auto",
        adapter: LoRA | None = None,
    ) -> None:
        self.device, self.dtype, self.spec, self.count_zeros = device, dtype, model, count_zeros
        self.mesh = make_mesh(device, dp_replicate=layout.dp_replicate, cp=layout.cp, tp=layout.tp)
        data = self.mesh[REPLICATE, SHARD]._flatten("dp")
        world = dist.group.WORLD
        assert world is not None
        self.world, self.group = world, data.get_group()
        self.data_rank, self.data_size = data.get_local_rank(), data.size()
        weights = model.weights(seed)
        context = Context(self.mesh.get_group(CONTEXT))
        self.compiled, self.adapter, self.reference_kind = compiled, adapter, reference
        options: dict[str, Any] = {
            "seed": seed,
            "context": context,
            "dtype": dtype,
            "device": device,
            "compiled": compiled,
            "kernels": kernels,
        }
        self.scorer = build_scorer(
            model, weights, self.mesh, layout, trainable=True, adapter=adapter, **options
        )
        self.reference: Scorer | None = None
        if reference == "frozen":
            if reference_model is not None:
                model, weights = reference_model, reference_model.weights(seed)
            self.reference = build_scorer(model, weights, self.mesh, layout, trainable=False, **options)
        self.max_grad_norm, self.moments = optimizer.max_grad_norm, optimizer.moments
        # The shards, once: while a module is gathered it shows its whole parameters instead.
        self.named_weights = list(self.scorer.named_weights())
        self.weights = {name: parameter for name, parameter in self.named_weights if parameter.requires_grad}
        self.sizes, self.routing = self.scorer.sizes(), self.scorer.routing
        self.members = [m for m in self.scorer.members() if m.parameter.requires_grad or adapter is None]
        self.trained = [m for m in self.members if m.parameter.requires_grad]
        # Of a model that an adapter is trained for, they stay what they are.
        self.biases = bias_buffers(self.scorer.lm) if adapter is None else {}
        self.optimizer = torch_optimizer(optimizer, list(self.weights.items()))
        self.sums: Sums | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # Dropout: every rank draws its own stream from here on.
        torch.manual_seed(seed + dist.get_rank())

    # ---- the train step

    def counts(self, batch: Batch) -> dict[str, int]:
        return self.spec.counts(batch)

    def begin_train_step(self, counts: Mapping[str, int] | None = None) -> None:
        assert self.sums is None, "begin_train_step: the step before was neither finished nor aborted"
        total = None if counts is None else reduce_counts(counts, self.group, self.device)
        self.sums = Sums(total, main_apart=self.spec.adds_terms)
        if self.routing is not None:
            self.routing.begin(total)

    def train_microbatches(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        *,
        last: bool = False,  # noqa: ARG002  gradients are reduced with the last micro-batch of every call
    ) -> None:
        assert self.sums is not None, "train_microbatches outside of a train step"
        with naming_microbatch(microbatches) as begin:
            for index, here in enumerate(microbatches):
                begin(index)
                # Gradients of a call add up in place and are reduced with its last micro-batch.
                self._set_gradient_sync(index == len(microbatches) - 1)
                batch, ahead = here.to(self.device), self.spec.mtp.batches(here)
                stats, further = self._stats(self.scorer, batch, loss, ahead)
                output, counts = with_further(
                    loss(stats, batch),
                    loss.counts(here),  # of what lies here: reading a GPU would wait
                    self.spec.mtp,
                    ahead,
                    further,
                )
                self.sums.objective(output).backward()
                self.sums.add(output, counts)

    def finish_train_step(self, lr: float, *, max_loss: float = math.inf) -> StepResult:
        assert self.sums is not None, "finish_train_step without begin_train_step"
        means, n_main = self.sums.reduce(self.group, self.device)
        whole_grads = [p.grad for p in self.weights.values() if p.grad is not None]
        grads = [stored(g) for g in whole_grads]
        torch._foreach_div_(grads, max(n_main, 1))
        counted = [stored(g) for g in whole_grads if primary(g)]
        total_norm = global_norm(counted, self.world, self.device)
        grad_norm, loss = total_norm.item(), means.pop("loss")
        zeros = self._count_zeros(counted) if self.count_zeros else None
        if self.routing is not None:
            loss, added = self.routing.finish(loss)
            means |= added
        if max_loss < math.inf:  # a last bit must not have groups of ranks decide differently
            loss = self.max_over_ranks(loss)
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm) and loss <= max_loss)
        if not skipped:
            self._update(grads, total_norm, lr)
            if self.routing is not None:
                self.routing.update_biases()
        self._drop_gradients()
        self.sums = None
        return StepResult(loss, grad_norm, skipped, means, zeros)

    def abort_train_step(self) -> None:
        self.sums = None
        if self.routing is not None:
            self.routing.abort()
        discard_iteration(self.scorer)
        self._drop_gradients()

    # ---- without gradient

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor]:
        if reference and self.reference is None:
            assert self.reference_kind == "adapter_off", "the engine was built without a reference model"
            with without_adapter(self.scorer):
                return self._logps(self.scorer, microbatches)
        return self._logps(self.reference if reference and self.reference else self.scorer, microbatches)

    def _logps(self, model: Scorer, microbatches: Sequence[Batch]) -> list[Tensor]:
        logps = []
        for joined in bins.cut(microbatches, self.group, self.device):
            found, *_ = model(bins.join(joined).to(self.device), frozenset(), None)
            logps += bins.split(found, joined)
        release(model)
        return logps

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        return add_up(values, self.group, self.device)

    max_over_ranks = staticmethod(largest)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        sums = Sums()
        self.scorer.eval()
        for microbatches in batches:
            prepared = loss.prepare(microbatches, self)
            with naming_microbatch(prepared) as begin:
                for index, here in enumerate(prepared):
                    begin(index)
                    batch = here.to(self.device)
                    stats, _ = self._stats(self.scorer, batch, loss)
                    sums.add(loss(stats, batch), loss.counts(here))
        self.scorer.train()
        release(self.scorer)
        means, _ = sums.reduce(self.group, self.device)
        return means

    # ---- state

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        optimizer = None if model_only else self.optimizer
        return state.saved_tensors(
            self.trained, self.biases, optimizer, self.moments, dist.get_rank(), self.device
        )

    def load(self, path: Path) -> None:
        rank, device = dist.get_rank(), self.device
        state.load(path, self.trained, self.biases, self.optimizer, self.moments, rank, device)

    def export(self, path: Path) -> None:
        def gathered() -> Iterator[tuple[str, Tensor]]:
            for member in self.members:
                tensor = whole(member.cut(member.parameter.detach()))
                if member.writes:
                    yield member.name, tensor
            if dist.get_rank() == 0:
                yield from self.biases.items()

        if self.adapter is not None:
            export_adapter(self.adapter, self.spec, gathered(), path)
            return
        converted = ((name, t.to(stored_dtype(name, self.dtype))) for name, t in gathered())
        export_folder(self.spec, converted, path, self.dtype)

    def barrier(self) -> None:
        dist.barrier()

    def describe(self) -> dict[str, Any]:
        experts = next(iter(grouped_experts(self.scorer.lm).values()), None)
        shared_out = {} if experts is None or experts.ep is None else {"experts": described(experts.mesh)}
        return {
            "engine": "fsdp2",
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": self.scorer.kernels,
            "compiled": self.compiled,
            "world_size": dist.get_world_size(),
            "mesh": described(self.mesh) | shared_out,
            "parameters": sum(self.sizes.values()),
            "trained_parameters": sum(self.sizes[name] for name in self.weights),
        }

    def close(self) -> None:
        del self.scorer, self.reference, self.optimizer, self.weights, self.named_weights
        del self.members, self.trained, self.biases, self.routing
        gc.collect()  # FSDP's hooks are cycles, and the next run of this process needs the memory
        forget_meshes()
        process_group.leave()

    # ---- private

    def _stats(
        self, model: Scorer, batch: Batch, loss: Loss, ahead: Sequence[Batch] = ()
    ) -> tuple[TokenStats, list[Tensor]]:
        """What ``loss`` asks for, and the logps of every depth of ``ahead``."""
        moved = [further.to(self.device) for further in ahead]
        logps, logsumexp, mean, *further = model(batch, loss.requires, loss.weights(batch), moved)
        return TokenStats(logps, logsumexp, mean), further

    def _set_gradient_sync(self, enabled: bool) -> None:
        for module in fsdp_modules(self.scorer):
            module.set_requires_gradient_sync(enabled, recurse=False)
            module.set_is_last_backward(enabled)

    def _update(self, grads: list[Tensor], total_norm: Tensor, lr: float) -> None:
        if self.max_grad_norm and grads:
            # Not by torch's own function: experts may lie on another mesh than what is around them.
            factor = (self.max_grad_norm / (total_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _count_zeros(self, grads: Sequence[Tensor]) -> int:
        zeros = sum((g == 0).sum() for g in grads)
        total = torch.as_tensor(zeros, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self.world)
        return int(total.item())
