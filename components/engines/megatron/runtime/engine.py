"""The Megatron engine: one train step split into many passes of a schedule and one update."""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from components.engines import process_group
from components.engines.megatron.checks import uses_transformer_engine
from components.engines.megatron.layout import Layout
from components.engines.megatron.runtime import schedule, state
from components.engines.megatron.runtime.config import transformer_config
from components.engines.megatron.runtime.groups import initialize_groups, mesh, random_stream
from components.engines.megatron.runtime.model import build_chunks, padded
from components.engines.megatron.runtime.optimizer import Update
from components.engines.megatron.runtime.weights import (
    Blocks,
    blocks,
    export,
    fill,
    load_weights,
    tensor_mesh,
)
from components.engines.sums import Sums, reduce_counts
from components.models import ModelSpec, named_shapes
from components.optimizers import Optimizer
from runner.protocols import Batch, Loss, StepResult, TokenStats


class MegatronEngine:
    """Implements ``runner.protocols.Engine`` over megatron-core.

    Every rank builds it together, inside a process group. Losses run on the last pipeline stage, on every
    tensor- and context-parallel rank alike: they see whole rows and whole log-probabilities. Every rank of a
    pipeline gets that stage's sums.
    """

    def __init__(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        layout: Layout,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        with_reference: bool = False,
        count_zeros: bool = False,
    ) -> None:
        self.device, self.dtype, self.spec, self.layout = device, dtype, model, layout
        self.count_zeros, self.max_grad_norm = count_zeros, optimizer.max_grad_norm
        initialize_groups(layout)
        self.ranks = mesh()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        # Dropout: ranks that share a token's activations draw the same stream, others their own.
        model_parallel_cuda_manual_seed(seed + 100 * random_stream())
        self.hf = model.config()
        self.shapes = named_shapes(model.build(self.hf))
        self.config = transformer_config(self.hf, layout, dtype)
        source = model.weights(seed)
        self.reference: list[nn.Module] | None = None
        if with_reference:
            self.reference, found = self._build()
            load_weights(found, source)
            for chunk in self.reference:
                chunk.requires_grad_(False).eval()
        bare, self.blocks = self._build()
        self.chunks = [distribute(self.config, chunk, layout, number) for number, chunk in enumerate(bare)]
        self.update = Update.build(optimizer, self.chunks, layout, dtype)
        for parameter, members in self.blocks.items():
            whole = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            fill(whole, members, source)
            self.update.write(parameter, "model", whole)
        self.tp_mesh = tensor_mesh(device.type)
        self.sums: Sums | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _build(self) -> tuple[list[nn.Module], Blocks]:
        """Chunks in the run's dtype, without values, and what their parameters consist of."""
        kind: Literal["cpu", "cuda"] = "cuda" if self.device.type == "cuda" else "cpu"
        engine = uses_transformer_engine(self.hf, self.layout, self.dtype, kind)
        bare = build_chunks(self.hf, self.config, transformer_engine=engine)
        found = blocks(bare, self.shapes)
        if self.dtype == torch.float32:
            return list(bare), found
        return [Float16Module(self.config, chunk) for chunk in bare], found

    # ---- the train step

    def begin_train_step(self, counts: Mapping[str, int] | None = None) -> None:
        assert self.sums is None, "begin_train_step: the step before was neither finished nor aborted"
        group = parallel_state.get_data_parallel_group()
        self.sums = Sums(None if counts is None else reduce_counts(counts, group, self.device))

    def train_microbatches(self, microbatches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        assert self.sums is not None, "train_microbatches outside of a train step"
        overlap = last and self.layout.overlap_grad_reduce and self.layout.pp == 1
        alone = len(microbatches) - 1 if overlap else len(microbatches)
        for part, reduce in ((microbatches[:alone], False), (microbatches[alone:], True)):
            consume = partial(self._add, self.sums, part, loss)
            self._run(self.chunks, part, consume, loss=loss, reduce=reduce)

    def finish_train_step(self, lr: float) -> StepResult:
        assert self.sums is not None, "finish_train_step without begin_train_step"
        means, n_main = self._agree(self.sums)
        if self.layout.overlap_grad_reduce:
            for group in self._bucket_groups():
                if group.grad_reduce_handle is None:  # not begun by the last backward
                    group.start_grad_sync()
        finalize_model_grads(self.chunks)
        for chunk in self.chunks:
            chunk.scale_gradients(1 / max(n_main, 1))
        grad_norm, loss = self.update.prepare().item(), means.pop("loss")
        zeros = self._count_zeros() if self.count_zeros else None
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not skipped:
            self.update.apply(lr, grad_norm, self.max_grad_norm)
        self._drop_gradients()
        self.sums = None
        return StepResult(loss, grad_norm, skipped, means, zeros)

    def abort_train_step(self) -> None:
        self.sums = None
        for group in self._bucket_groups():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            group.per_param_grad_ready_counts = {}  # Megatron would take those of half a backward for all
        self._drop_gradients()

    # ---- without gradient

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        chunks = self.reference if reference else self.chunks
        assert chunks is not None, "the engine was built without a reference model"
        found: list[Tensor] = []

        def consume(_: int, stats: TokenStats) -> Tensor:
            found.append(stats.logps)
            return stats.logps.sum()

        self._run(chunks, microbatches, consume, forward_only=True)
        return found if self.is_last_stage else None

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        sums = Sums()
        with without_dropout(self.chunks):
            for microbatches in batches:
                prepared = loss.prepare(microbatches, self)
                consume = partial(self._add, sums, prepared, loss)
                self._run(self.chunks, prepared, consume, loss=loss, forward_only=True)
        means, _ = self._agree(sums)
        return means

    # ---- state

    def save(self, path: Path, *, model_only: bool = False) -> None:
        state.save(path, self.blocks, self.update, self.device, model_only=model_only)

    def load(self, path: Path) -> None:
        self.gather_parameters()  # none may be under way into what is about to be overwritten
        state.load(path, self.blocks, self.update, self.device)

    def export(self, path: Path) -> None:
        self.gather_parameters()
        export(self.blocks, self.spec, path, self.dtype)

    def gather_parameters(self) -> None:
        """What an update has left to the next forward pass, where parameters are gathered in it."""
        if self.layout.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def barrier(self) -> None:
        dist.barrier()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "megatron",
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "world_size": dist.get_world_size(),
            "mesh": self.ranks,
            "chunks_per_stage": self.layout.vpp,
            "parameters": sum(shape.numel() for shape in self.shapes.values()),
        }

    def close(self) -> None:
        del self.chunks, self.reference, self.update, self.blocks, self.tp_mesh
        RotaryEmbedding.forward.cache_clear()  # it keeps the model that it is a method of
        gc.collect()
        parallel_state.destroy_model_parallel()
        process_group.leave()

    # ---- private

    def _run(
        self,
        chunks: Sequence[nn.Module],
        microbatches: Sequence[Batch],
        consume: schedule.Consume,
        **options: Any,
    ) -> None:
        schedule.run(chunks, microbatches, consume, layout=self.layout, device=self.device, **options)

    def _add(
        self, sums: Sums, microbatches: Sequence[Batch], loss: Loss, number: int, stats: TokenStats
    ) -> Tensor:
        """The loss of one micro-batch, on the last stage."""
        here = microbatches[number]
        output = loss(stats, here.to(self.device))
        sums.add(output, loss.counts(here))  # counted where it was made: reading a GPU would wait
        return sums.objective(output)

    def _agree(self, sums: Sums) -> tuple[dict[str, float], int]:
        """Means and the main count, as the last stage has them, on every rank."""
        answer = None
        if self.is_last_stage:
            answer = sums.reduce(parallel_state.get_data_parallel_group(), self.device)
        box = [answer]
        if self.layout.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(box, src=last, group=group, device=self.device)
        assert box[0] is not None
        return box[0]

    def _bucket_groups(self) -> Iterator[Any]:
        return (group for chunk in self.chunks for group in chunk.bucket_groups)

    def _drop_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.update.optimizer.zero_grad()

    def _count_zeros(self) -> int:
        """Padded rows of the vocabulary left out: their gradients are always zero, and no weights."""
        rows = padded(self.hf.vocab_size, self.config) - self.hf.vocab_size
        matrices = 1 if self.hf.tie_word_embeddings else 2
        return self.update.count_zeros() - rows * self.hf.hidden_size * matrices


def distribute(
    config: TransformerConfig, chunk: nn.Module, layout: Layout, number: int
) -> DistributedDataParallel:
    """Data parallelism with gradients that add up, and are reduced, in fp32."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
    )
    # Chunks past the first end their backward early: nothing is gained by reducing them in parts.
    return DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)


@contextmanager
def without_dropout(chunks: Sequence[nn.Module]) -> Iterator[None]:
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()
