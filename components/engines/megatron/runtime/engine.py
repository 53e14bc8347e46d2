"""The Megatron engine, in which a train step is one or more passes of a pipeline schedule and one update."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from components.adapters import export_adapter
from components.checkpoint.reader import StoredTensors
from components.contracts.batch import Batch
from components.contracts.engine import EngineOptions
from components.contracts.json_types import Json
from components.contracts.loss import Loss
from components.engines.megatron.checks import updates_whole_weights
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime import schedule, state_dict
from components.engines.megatron.runtime.hf_weights import (
    HFTensorSlices,
    TPMeshes,
    fill_parameter,
    fill_parameters,
    full_hf_tensors,
)
from components.engines.megatron.runtime.model import padded_vocab_size
from components.engines.megatron.runtime.model_builder import (
    build_model_chunks,
    initial_weights,
    link_gathers,
    wrap_ddp,
)
from components.engines.megatron.runtime.moe_router import MegatronRouterState, clear_router_state
from components.engines.megatron.runtime.optimizer import MegatronOptimizers
from components.engines.megatron.runtime.parallel_state import (
    from_last_stage,
    gather_mesh_info,
    initialize_groups,
    random_stream,
)
from components.engines.megatron.runtime.transformer_config import transformer_config
from components.engines.megatron.runtime.whole_weights import WholeWeightUpdate
from components.engines.shared import process_group
from components.engines.shared.loss_accumulator import LossAccumulator
from components.engines.shared.loss_scale import LossScale, load_scale, scale_tensors
from components.engines.shared.mtp import TokenStatsWithMTP, add_mtp_losses
from components.engines.shared.neftune import NEFTune
from components.engines.shared.train_step import TrainStepEngine, without_dropout
from components.models import ModelSpec, export_folder
from components.models.experts import stored_dtype
from components.models.hf_private import adapters_off
from components.optimizers import Optimizer


class MegatronEngine(TrainStepEngine):
    """Implementation of ``components.contracts.engine.Engine`` with megatron-core.

    All ranks must build it together, inside a process group. Losses are computed on the last pipeline stage,
    redundantly on every tensor- and context-parallel rank, from whole rows and complete log-probabilities.
    Every pipeline stage receives the last stage's sums.
    """

    routing: MegatronRouterState | None

    def __init__(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        layout: Layout,
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        self.device, self.spec, self.layout, self.options = device, model, layout, options
        self.max_grad_norm, self.loss_scale = optimizer.max_grad_norm, LossScale.build(options.loss_scaling)
        initialize_groups(layout)
        self.group = parallel_state.get_data_parallel_group()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        adapter = options.adapter
        self.dropout_seed = options.seed if adapter is not None and adapter.dropout else None
        # Dropout in attention draws from Megatron's tracker, which has another stream on every tp rank.
        model_parallel_cuda_manual_seed(options.seed + 100 * random_stream())
        self.hf = model.config()
        self.meta = model.meta_model
        self.config = transformer_config(self.hf, layout, options)
        source = initial_weights(model, self.meta, options)
        self.reference: list[nn.Module] | None = None
        self.kept: HFTensorSlices = {}
        if options.reference == "frozen":
            other = options.reference_model
            self.reference = self._frozen(model if other is None else other)
        parts = build_model_chunks(self.meta, self.config, layout, options)
        self.blocks, self.frozen, self.stored = parts.trained, parts.frozen, parts.stored
        fill_parameters(self.frozen | self.stored, source)
        self.routing = None
        if self.config.experts is not None:
            drops = layout.capacity_factor is not None
            self.routing = MegatronRouterState(model.moe, self.meta, parts.routers, device, drops=drops)
        self.offloading = parts.offloading
        self.meshes = TPMeshes(device.type)
        whole, sharded = updates_whole_weights(optimizer), layout.distributed_optimizer
        self.gathers_during_forward = layout.gathers_during_forward(whole_updates=whole)
        self.chunks = [
            wrap_ddp(self.config, chunk, layout, number, scattered=sharded and not whole)
            for number, chunk in enumerate(parts.chunks)
        ]
        if self.gathers_during_forward:
            link_gathers(self.chunks)
        self.update = (
            WholeWeightUpdate(optimizer, self.blocks, self.meshes, divided=sharded)
            if whole
            else MegatronOptimizers.build(optimizer, self.chunks, layout, options.dtype, self.blocks)
        )
        for parameter, members in self.blocks.items():
            values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            fill_parameter(values, members, source)
            self.update.write(parameter, "model", values)
        if device.type == "cuda":
            torch.accelerator.reset_peak_memory_stats(device)

    def _frozen(self, model: ModelSpec) -> list[nn.Module]:
        """Build the chunks of ``model`` with its initial weights, frozen and in evaluation mode."""
        hf, options = model.config(), replace(self.options, adapter=None)
        config = transformer_config(hf, self.layout, options)
        parts = build_model_chunks(model.meta_model, config, self.layout, options)
        self.kept = parts.trained | parts.frozen
        fill_parameters(self.kept | parts.stored, options.watched(model.weights(options.seed)))
        return [chunk.requires_grad_(False).eval() for chunk in parts.chunks]

    # ---- the train step

    def train_microbatches(self, microbatches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        assert self.sums is not None, "train_microbatches outside of a train step"
        wanted = schedule.Pass(
            loss,
            self.spec.mtp,
            None if self.routing is None else self.routing.routers,
            reduce=last and self.layout.overlap_grad_reduce,
            neftune=NEFTune(self.spec.neftune_alpha, self.options.seed),
            dropout_seed=self.dropout_seed,
            factor=self.sums.factor,
        )
        consume = partial(self._add, self.sums, microbatches, loss)
        schedule.run_schedule(self.chunks, microbatches, consume, self.layout, self.device, wanted)

    def reduce_sums(self, sums: LossAccumulator) -> tuple[dict[str, float], int]:
        """Return the last pipeline stage's means and count, on every rank."""
        return from_last_stage(super().reduce_sums(sums) if self.is_last_stage else None, self.device)

    def reduce_gradients(self) -> None:
        if self.layout.overlap_grad_reduce:
            for group in self._bucket_groups():
                if group.grad_reduce_handle is None:  # not started by the last backward pass
                    group.start_grad_sync()
        finalize_model_grads(self.chunks)

    def divide_gradients(self, divisor: float) -> None:
        for chunk in self.chunks:
            chunk.scale_gradients(1 / divisor)

    def grad_norm(self) -> float:
        return self.update.prepare().item()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, members in self.blocks.items():
            if (part := self.update.gradient(parameter)) is not None:
                yield members[0].name, part

    def count_zeros(self) -> int:
        """Count the zero gradients of weights, not those of vocabulary padding, which are always zero."""
        rows = padded_vocab_size(self.hf.vocab_size, self.config) - self.hf.vocab_size
        split = (self.meta.get_input_embeddings(), self.meta.get_output_embeddings())
        # Tied weights count once. A scalar head has no padding.
        matrices = {module.weight for module in split if module is not None}
        trained = sum(self.options.adapter is None and matrix.requires_grad for matrix in matrices)
        return self.update.count_zeros() - rows * self.hf.hidden_size * trained

    def apply_update(self, lr: float, grad_norm: float) -> None:
        self.update.apply(lr, grad_norm, self.max_grad_norm)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.update.zero_grad()

    def reference_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.gather_parameters()
        held = {members[0].name: parameter for parameter, members in (self.blocks | self.frozen).items()}
        for kept, members in self.kept.items():
            trained = held[members[0].name]
            yield kept, self.update.read(trained, "model") if trained in self.blocks else trained

    def cancel_backward(self) -> None:
        for group in self._bucket_groups():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            # Counts of an interrupted backward pass would be taken for complete ones.
            group.per_param_grad_ready_counts = {}
        if self.offloading is not None:
            self.offloading.finish()

    @contextmanager
    def keeping_random_streams(self) -> Iterator[None]:
        rank = dist.get_rank()
        streams = state_dict.random_states(self.device, rank)
        try:
            yield
        finally:
            state_dict.restore_rng(streams, self.device, rank)

    def allocated_optimizer_state(self) -> AbstractContextManager[None]:
        return self.update.allocated_state()

    # ---- without gradient

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        found: list[Tensor] = []

        def consume(_: int, stats: TokenStatsWithMTP) -> Tensor:
            found.append(stats.logps)
            return stats.logps.sum()

        with self._scorer(reference=reference) as chunks:
            seed = self.dropout_seed if self.chunks[0].training and not reference else None
            wanted = schedule.Pass(forward_only=True, dropout_seed=seed)
            schedule.run_schedule(chunks, microbatches, consume, self.layout, self.device, wanted)
        return found if self.is_last_stage else None

    def evaluating(self) -> AbstractContextManager[None]:
        return without_dropout(self.chunks)

    def evaluate_microbatches(self, microbatches: Sequence[Batch], loss: Loss, sums: LossAccumulator) -> None:
        consume = partial(self._add, sums, microbatches, loss, train=False)
        wanted = schedule.Pass(loss, forward_only=True)
        schedule.run_schedule(self.chunks, microbatches, consume, self.layout, self.device, wanted)

    # ---- state

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        blocks, stored = self.blocks, self.stored
        tensors = state_dict.saved_tensors(blocks, stored, self.update, self.device, model_only=model_only)
        if model_only:
            return tensors
        if self.options.sync_reference:
            tensors |= state_dict.reference_tensors(self.kept)
        return tensors | scale_tensors(self.loss_scale)

    def load(self, path: Path, *, model_only: bool = False) -> None:
        self.gather_parameters()  # a pending all-gather would overwrite the loaded parameters
        if model_only:
            state_dict.load_weights(path, self.blocks, self.stored, self.update)
        else:
            load_scale(path, self.loss_scale)
            state_dict.load(path, self.blocks, self.stored, self.update, self.device)
        if self.options.sync_reference:
            source = StoredTensors(path)
            fill_parameters(self.kept, lambda name, index=(): source.read(f"reference/{name}", index))

    def export(self, path: Path) -> None:
        self.gather_parameters()
        adapter, dtype = self.options.adapter, self.options.dtype
        if adapter is not None:
            added = full_hf_tensors(self.blocks, self.meshes, lambda p: self.update.read(p, "model"))
            initial = full_hf_tensors(self.stored, self.meshes, lambda p: p)
            export_adapter(adapter, self.spec, chain(added, initial), path)
        else:
            held = self.blocks | self.frozen | self.stored
            tensors = full_hf_tensors(held, self.meshes, lambda p: p)
            converted = ((n, t.to(stored_dtype(n, dtype))) for n, t in tensors)
            export_folder(self.spec, converted, path, dtype)

    def gather_parameters(self) -> None:
        """Complete the parameter all-gather that the last update has deferred to the next forward pass."""
        if self.gathers_during_forward:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def describe(self) -> Json:
        adapter = self.options.adapter
        shapes = {} if adapter is None else adapter.shapes(self.meta)
        added = sum(shape.numel() for shape in shapes.values())
        initial = {} if adapter is None else adapter.initial_shapes(self.meta)
        return {
            "engine": "megatron",
            "device": str(self.device),
            "dtype": str(self.options.dtype).removeprefix("torch."),
            "float8": {"recipe": self.layout.fp8_recipe} if self.options.float8 else {},
            "kernels": "transformer_engine" if self.config.transformer_engine else "local",
            "world_size": dist.get_world_size(),
            "mesh": gather_mesh_info(self.layout),
            "chunks_per_stage": self.layout.vpp,
            "parameters": sum(p.numel() for p in self.meta.parameters())
            + added
            + sum(shape.numel() for shape in initial.values()),
            "trained_parameters": added or sum(p.numel() for p in self.meta.parameters() if p.requires_grad),
        }

    def close(self) -> None:
        clear_router_state([*self.chunks, *(self.reference or ())])
        del self.chunks, self.reference, self.kept, self.update, self.blocks, self.stored
        del self.frozen, self.meshes, self.routing, self.config  # which holds methods of the chunks
        RotaryEmbedding.forward.cache_clear()  # the cached method holds a reference to the model
        gc.collect()
        parallel_state.destroy_model_parallel()
        process_group.destroy_process_group()

    # ---- private

    @contextmanager
    def _scorer(self, *, reference: bool) -> Iterator[Sequence[nn.Module]]:
        """Yield the chunks for ``logps``.

        An ``adapter_off`` reference is the trained model without adapter and dropout.
        """
        if not reference:
            yield self.chunks
        elif self.options.reference == "adapter_off":
            with without_dropout(self.chunks), adapters_off(*self.chunks):
                yield self.chunks
        else:
            assert self.reference is not None, "the engine was built without a reference model"
            yield self.reference

    def _add(
        self,
        sums: LossAccumulator,
        microbatches: Sequence[Batch],
        loss: Loss,
        number: int,
        stats: TokenStatsWithMTP,
        train: bool = True,
    ) -> Tensor:
        """Add one micro-batch's loss to ``sums``; return the scalar to differentiate (last stage only)."""
        here, terms = microbatches[number], self.spec.mtp
        output, counts = loss(stats, here.to(self.device)), loss.counts(here)
        if train:
            output, counts = add_mtp_losses(output, counts, terms, terms.batches(here), stats.mtp)
        sums.add(output, counts)  # counted on the host; reading from the GPU would block
        # The counts of an evaluation are known only at its end, and the schedule accepts any scalar.
        return sums.scaled_loss(output) if train else next(iter(output.terms.values()))

    def _bucket_groups(self) -> Iterator[Any]:
        return chain(*(c.bucket_groups + c.expert_parallel_bucket_groups for c in self.chunks))
