"""Rank functions of test_megatron_own_path.py: one step by Megatron's code and by our engine."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from components.contracts.batch import IGNORE
from components.contracts.engine import EngineOptions
from components.contracts.loss import TokenStats
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models import ModelSpec
from components.optimizers import AdamW
from tests.distributed.cases import COMMON, SHAPES, next_token, share, step
from tests.distributed.gradients import capture, gradients

TIED = ModelSpec(architecture=COMMON | SHAPES["qwen3"] | {"num_hidden_layers": 4})
MICRO_BATCH = 1


def build(on: FSDP2 | Megatron) -> Any:
    return on.build(
        TIED,
        AdamW(lr=1e-3, max_grad_norm=None),
        EngineOptions(dtype=torch.float32, device="cpu"),
    )


def split_step(on: Megatron, last: bool) -> dict[str, Tensor]:
    """Return the gradients of our step in two calls without counts; ``last`` marks the second as the last.

    It is the second of two steps from the same weights. The first step is shorter.
    """
    engine, loss = build(on), next_token()
    batches, found = share(engine, "packed", MICRO_BATCH), capture(engine)
    half = len(batches) // 2
    engine.begin_train_step()
    engine.train_microbatches(batches[half:], loss, last=True)
    engine.finish_train_step(lr=0.0)
    engine.begin_train_step()
    engine.train_microbatches(batches[:half], loss)
    engine.train_microbatches(batches[half:], loss, last=last)
    engine.finish_train_step(lr=0.0)
    engine.close()
    return found


def reduces_in_backward(on: Megatron) -> bool:
    """Return whether all reductions of a step begin in the backward pass of its last micro-batch.

    It is the second of two steps, because Megatron counts in the first one how often gradients are computed.
    """
    engine, loss = build(on), next_token()
    batches = share(engine, "packed", MICRO_BATCH)
    for _ in range(2):
        engine.begin_train_step()
        engine.train_microbatches(batches, loss, last=True)
        begun = [group.grad_reduce_handle is not None for group in engine._bucket_groups()]
        engine.finish_train_step(lr=0.0)
    engine.close()
    return len(begun) > 0 and all(begun)


def gathers_of_three_steps(on: FSDP2 | Megatron) -> tuple[list[tuple[float, float]], list[bool]]:
    """Return three losses and norms, and for each wait for weights whether their gather had begun before."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    wait, begun = Group.finish_param_sync, list[bool]()

    def spy(group: Any, *args: Any, **options: Any) -> None:
        begun.append(group.param_gather_dispatched)
        wait(group, *args, **options)

    engine = build(on)
    with patch.object(Group, "finish_param_sync", spy):
        results = [step(engine, share(engine, "packed", 2, seed=s), next_token()) for s in range(3)]
    engine.close()
    return [(result.loss, result.grad_norm) for result in results], begun


def lengths_on_stages(on: Megatron) -> tuple[list[int], list[int]]:
    """Return the length of the hidden states of each micro-batch, and of the micro-batch itself."""
    engine, lengths = build(on), list[int]()
    batches = share(engine, "padded", MICRO_BATCH)
    layer = engine.chunks[0].module.decoder.layers[0]
    layer.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(len(given["hidden_states"])), with_kwargs=True
    )
    engine.begin_train_step()
    engine.train_microbatches(batches, next_token(), last=True)
    engine.finish_train_step(lr=0.0)
    engine.close()
    return lengths, [batch.labels.shape[1] for batch in batches]


def own_step(on: Megatron) -> dict[str, Tensor]:
    """Return the gradients of the second of two steps by Megatron's schedule with its own reductions.

    In the first step, Megatron counts how often each gradient is computed. It overlaps reductions only after.
    Stages tell each other the shape of every tensor first, as Megatron-LM does for rows of different lengths.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from components.engines.megatron.runtime.schedule import Pass, make_inputs

    engine = build(on)
    set_hooks(engine.chunks, engine.config, on)
    engine.config.variable_seq_lengths = on.pp > 1 == on.vpp
    items = make_inputs(share(engine, "packed", MICRO_BATCH), on, engine.device, Pass())
    for _ in range(2):
        engine.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in engine.chunks],
            model=engine.chunks,
            num_microbatches=len(items),
            seq_length=items[0].request.shard.input_ids.shape[1] * on.cp,
            micro_batch_size=1,
            forward_only=False,
        )
    engine.update.prepare()
    found = gradients(engine)
    engine.close()
    return found


def set_hooks(chunks: list[Any], config: Any, on: Megatron) -> None:
    """Set the hooks as ``train`` in Megatron-LM's megatron/training/training.py does."""
    from megatron.core.distributed import finalize_model_grads

    def each(name: str) -> Any:
        hooks = [getattr(chunk, name) for chunk in chunks]
        return hooks[0] if len(hooks) == 1 else hooks

    if on.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        config.grad_sync_func = each("start_grad_sync")
    if on.overlap_param_gather:
        config.param_sync_func = each("start_param_sync")
    config.finalize_model_grads_func = finalize_model_grads


def forward_step(source: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    asked = next(source).request
    return chunk(asked), partial(loss_sum, asked.shard.labels)


def loss_sum(labels: Tensor, stats: TokenStats) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return loss sum and label count of this rank, as ``loss_func`` in Megatron-LM's pretrain_gpt.py."""
    return -stats.logps.sum(), (labels != IGNORE).sum().to(torch.int), {}
