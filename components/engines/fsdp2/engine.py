"""The FSDP2 engine: weights are sharded, and gradients are summed and then divided once per step."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from components.adapters import export_adapter
from components.checkpoint.dcp import EVALUATED, load_tensors
from components.contracts.batch import Batch
from components.contracts.engine import EngineOptions
from components.contracts.json_types import Json
from components.contracts.loss import Loss, TokenStats
from components.engines.fsdp2 import float8, state_dict
from components.engines.fsdp2.context_parallel import ModelInput
from components.engines.fsdp2.fsdp_private import discard_iteration, fsdp_modules, release
from components.engines.fsdp2.grouped_experts import bias_buffers, grouped_experts
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.log_prob_model import LogProbModel
from components.engines.fsdp2.lora import is_initial
from components.engines.fsdp2.mesh import (
    REPLICATE,
    SHARD,
    full_tensor,
    is_primary_replica,
    local_shard,
    make_mesh,
    mesh_info,
)
from components.engines.fsdp2.parallelize import build_model
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer
from components.engines.fsdp2.whole_weights import whole_weights
from components.engines.shared import microbatch_merging, process_group
from components.engines.shared.loss_accumulator import LossAccumulator, clip, count_zeros, global_norm
from components.engines.shared.loss_scale import LossScale, load_scale, scale_tensors
from components.engines.shared.mtp import add_mtp_losses
from components.engines.shared.neftune import NEFTune
from components.engines.shared.oom import naming_microbatch
from components.engines.shared.torch_private import clear_dtensor_caches, flattened
from components.engines.shared.train_step import TrainStepEngine, without_dropout
from components.engines.shared.whole_weights import WholeWeightOptimizer
from components.models import ModelSpec, export_folder
from components.models.experts import stored_dtype
from components.models.hf_private import adapters_off
from components.optimizers import Optimizer, needs_whole_weights

log = logging.getLogger(__name__)


class FSDP2Engine(TrainStepEngine):
    """Implementation of ``components.contracts.engine.Engine`` with ``torch.distributed.fsdp.fully_shard``.

    All ranks build it together, inside a process group. Weights are read from ``model`` by their Hugging Face
    names. If ``options.reference`` is ``frozen``, the reference model is a second copy of the initial
    weights, or ``reference_model``; if it is ``adapter_off``, it is the model without its adapter.
    ``weights`` are the trained parameters. Frozen parameters have no gradient and no moments, and are not in
    checkpoints.
    """

    def __init__(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        layout: FSDP2Layout,
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        self.device, self.spec, self.options = device, model, options
        self.mesh = make_mesh(device, dp_replicate=layout.dp_replicate, cp=layout.cp, tp=layout.tp)
        data = flattened(self.mesh[REPLICATE, SHARD], "dp")
        world = dist.group.WORLD
        assert world is not None
        self.world, self.group = world, data.get_group()
        self.dp_rank, self.dp_size = data.get_local_rank(), data.size()
        weights, adapter = options.watched(model.weights(options.seed)), options.adapter
        self.scorer = build_model(model, weights, self.mesh, layout, options, device, trainable=True)
        if self.scorer.float8:
            log.info("products in float8: %s", ", ".join(f"{k} {v}" for k, v in self.scorer.float8.items()))
        self.scorer.neftune = NEFTune(model.neftune_alpha, options.seed)
        self.scorer.lm.get_input_embeddings().register_forward_hook(self.scorer.noise)
        self.reference: LogProbModel | None = None
        if options.reference == "frozen":
            if options.reference_model is not None:
                model = options.reference_model
                weights = options.watched(model.weights(options.seed))
            self.reference = build_model(model, weights, self.mesh, layout, options, device, trainable=False)
        self.kept = [] if self.reference is None else list(self.reference.named_weights())
        self.synced = list(self.reference.members()) if self.reference and options.sync_reference else []
        self.layout = layout
        self.max_grad_norm, self.loss_scale = optimizer.max_grad_norm, LossScale.build(options.loss_scaling)
        # Collected once, because a gathered module has its whole parameters instead of the shards.
        self.named_weights = list(self.scorer.named_weights())
        self.weights = {name: parameter for name, parameter in self.named_weights if parameter.requires_grad}
        self.sizes, self.routing = self.scorer.sizes(), self.scorer.routing
        members = list(self.scorer.members())
        self.trained = [m for m in members if m.parameter.requires_grad]
        self.stored = [m for m in members if m.parameter.requires_grad or is_initial(m.name)]
        self.members = members if adapter is None else self.stored
        # With an adapter, the router biases of the model do not change.
        self.biases = bias_buffers(self.scorer.lm) if adapter is None else {}
        self.optimizer = (
            WholeWeightOptimizer(optimizer, whole_weights(self.trained))
            if needs_whole_weights(optimizer)
            else ShardedOptimizer(optimizer, self.weights, self.trained)
        )
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        # For dropout in attention, every rank has its own random stream from here on.
        torch.manual_seed(options.seed + dist.get_rank())

    # ---- the train step

    def train_microbatches(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        *,
        last: bool = False,  # noqa: ARG002  gradients are reduced before every call returns
    ) -> None:
        assert self.sums is not None, "train_microbatches outside of a train step"
        with naming_microbatch(microbatches) as begin:
            for index, here in enumerate(microbatches):
                begin(index)
                self._prepare_fsdp(last=index == len(microbatches) - 1)
                given, ahead = self._given(here), self.spec.mtp.batches(here)
                stats, mtp = self._stats(given, loss, ahead, self.sums.factor)
                output, counts = add_mtp_losses(
                    loss(stats, given.batch),
                    loss.counts(here),  # of the copy in host memory: reading a GPU would wait
                    self.spec.mtp,
                    ahead,
                    mtp,
                )
                self.sums.scaled_loss(output).backward()
                self.sums.add(output, counts)

    def reduce_gradients(self) -> None:
        """Do nothing: the last micro-batch of ``train_microbatches`` has reduced the gradients."""

    def divide_gradients(self, divisor: float) -> None:
        torch._foreach_div_([local_shard(g) for g in self._gradients()], divisor)

    def grad_norm(self) -> float:
        return global_norm(self._counted(), self.world, self.device).item()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.weights.items():
            if parameter.grad is not None and is_primary_replica(parameter.grad):
                yield name, local_shard(parameter.grad)

    def count_zeros(self) -> int:
        return count_zeros(self._counted(), self.world, self.device)

    def apply_update(self, lr: float, grad_norm: float) -> None:
        # torch's own function is not used, because experts may be on another mesh than other parameters.
        clip([local_shard(g) for g in self._gradients()], grad_norm, self.max_grad_norm)
        self.optimizer.step(lr)
        self._update_scales()

    def zero_grad(self) -> None:
        for parameter in self.weights.values():
            parameter.grad = None

    def reference_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        for (name, kept), (same, trained) in zip(self.kept, self.named_weights, strict=True):
            assert name == same, "the reference has the parameters of the trained model"
            yield local_shard(kept), local_shard(trained)

    def cancel_backward(self) -> None:
        discard_iteration(self.scorer)
        if self.scorer.in_place_reduction is not None:
            self.scorer.in_place_reduction.reset()
        if self.scorer.offloading is not None:
            self.scorer.offloading.finish()

    def keeping_random_streams(self) -> AbstractContextManager[None]:
        devices = [] if self.device.type == "cpu" else [self.device]
        return torch.random.fork_rng(devices, device_type=self.device.type)

    def allocated_optimizer_state(self) -> AbstractContextManager[None]:
        return self.optimizer.allocated_state()

    # ---- without gradient

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor]:
        if reference and self.reference is None:
            assert self.options.reference == "adapter_off", "the engine was built without a reference model"
            with without_dropout([self.scorer]), adapters_off(self.scorer):
                return self._logps(self.scorer, microbatches)
        return self._logps(self.reference if reference and self.reference else self.scorer, microbatches)

    def _logps(self, model: LogProbModel, microbatches: Sequence[Batch]) -> list[Tensor]:
        logps = []
        for joined in microbatch_merging.group_microbatches(microbatches, self.group, self.device):
            found, *_ = model(self._given(microbatch_merging.merge(joined)), frozenset(), None)
            logps += microbatch_merging.unmerge(found, joined)
        release(model)
        return logps

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with without_dropout([self.scorer]), self.optimizer.evaluating() as changed:
            if changed:
                self._update_scales()
            yield
        release(self.scorer)
        if changed:
            self._update_scales()

    def evaluate_microbatches(self, microbatches: Sequence[Batch], loss: Loss, sums: LossAccumulator) -> None:
        with naming_microbatch(microbatches) as begin:
            for index, here in enumerate(microbatches):
                begin(index)
                given = self._given(here)
                stats, _ = self._stats(given, loss)
                sums.add(loss(stats, given.batch), loss.counts(here))

    # ---- state

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        with self.optimizer.evaluating() as changed:
            weights = state_dict.weight_tensors(self.stored, self.biases)
            if changed:
                weights = {key: tensor.clone() for key, tensor in weights.items()}
        if model_only:
            return weights
        tensors = state_dict.weight_tensors(self.stored, self.biases) | self.optimizer.tensors()
        tensors |= state_dict.rng_tensors(dist.get_rank(), self.device)
        tensors |= state_dict.weight_tensors(self.synced, {}, "reference")
        if changed:
            tensors |= {EVALUATED + key.removeprefix("model"): tensor for key, tensor in weights.items()}
        return tensors | scale_tensors(self.loss_scale)

    def load(self, path: Path, *, model_only: bool = False) -> None:
        if self.synced:
            load_tensors(path, state_dict.weight_tensors(self.synced, {}, "reference"))
        if model_only:
            state_dict.load_weights(path, self.stored, self.biases)
        else:
            load_scale(path, self.loss_scale)
            state_dict.load(path, self.stored, self.biases, self.optimizer, dist.get_rank(), self.device)
        self._update_scales()

    def export(self, path: Path) -> None:
        def gathered() -> Iterator[tuple[str, Tensor]]:
            for member in self.members:
                tensor = full_tensor(member.slices(member.parameter.detach()))
                if member.writes:
                    yield member.name, tensor
            if dist.get_rank() == 0:
                yield from self.biases.items()

        with self.optimizer.evaluating():
            if self.options.adapter is not None:
                export_adapter(self.options.adapter, self.spec, gathered(), path)
                return
            dtype = self.options.dtype
            converted = ((name, t.to(stored_dtype(name, dtype))) for name, t in gathered())
            export_folder(self.spec, converted, path, dtype)

    def describe(self) -> Json:
        experts = next(iter(grouped_experts(self.scorer.lm).values()), None)
        shared_out = {} if experts is None or experts.ep is None else {"experts": mesh_info(experts.mesh)}
        return {
            "engine": "fsdp2",
            "device": str(self.device),
            "dtype": str(self.options.dtype).removeprefix("torch."),
            "float8": self.scorer.float8,
            "kernels": self.scorer.kernels,
            "compiled": self.options.compiled,
            "world_size": dist.get_world_size(),
            "mesh": mesh_info(self.mesh) | shared_out,
            "parameters": sum(self.sizes.values()),
            "trained_parameters": sum(self.sizes[name] for name in self.weights),
        }

    def close(self) -> None:
        del self.scorer, self.reference, self.optimizer, self.weights, self.named_weights
        del self.members, self.trained, self.stored, self.biases, self.routing, self.kept, self.synced
        gc.collect()  # FSDP's hooks are reference cycles, and the next run of this process needs the memory
        # Otherwise a later mesh with the same ranks and names would get cached results with these groups.
        clear_dtensor_caches()
        process_group.destroy_process_group()

    # ---- private

    def _update_scales(self) -> None:
        if self.scorer.float8.get("all_gather"):
            float8.update_scales(self.scorer)

    def _given(self, here: Batch) -> ModelInput:
        return self.scorer.context.model_input(here, self.device)

    def _stats(
        self, given: ModelInput, loss: Loss, ahead: Sequence[Batch] = (), factor: float = 1.0
    ) -> tuple[TokenStats, list[Tensor]]:
        """Return the statistics that ``loss`` requires, and the logps of every MTP depth of ``ahead``."""
        depths = [self._given(shifted) for shifted in ahead]
        found = self.scorer(given, loss.requires, loss.weights(given.batch), depths, factor)
        number = len(fields(TokenStats))
        return TokenStats(*found[:number]), list(found[number:])

    def _prepare_fsdp(self, *, last: bool) -> None:
        """Set FSDP's options for the next backward pass.

        ``last`` means that it is the last one of a call of ``train_microbatches``.
        """
        reduces = last or self.layout.reduce_gradients == "every"
        if self.scorer.in_place_reduction is not None:
            self.scorer.in_place_reduction.output_is_input = not self._gradients()
        for module in fsdp_modules(self.scorer):
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_is_last_backward(reduces)
            # Weights that a forward pass keeps are gathered once for all micro-batches.
            module.set_reshard_after_backward(last or self.layout.reshard_after_forward, recurse=False)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.weights.values() if p.grad is not None]

    def _counted(self) -> list[Tensor]:
        """Return this rank's gradient shards, except those that another rank counts in sums over ranks."""
        return [gradient for _, gradient in self.named_gradients()]
