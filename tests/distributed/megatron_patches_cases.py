"""Rank functions of the tests of the patches, on two pipeline stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from components.engines.megatron.compat import cpu, no_te, pipeline_sends
from components.engines.megatron.compat.patching import find
from components.engines.shared.process_group import init_process_group

ANY_DEVICE = (*no_te.PATCHES, *pipeline_sends.PATCHES)
PATCHES = [patch for patch in (*cpu.PATCHES, *ANY_DEVICE) if patch.applies]
SYMBOLS = list(chain.from_iterable(patch.symbols for patch in PATCHES))


@contextmanager
def without(symbol: str | None) -> Iterator[None]:
    """Undo the patch of ``symbol`` inside the ``with`` block."""
    if symbol is None:
        yield
        return
    (patch,) = (patch for patch in PATCHES if symbol in patch.symbols)
    owner, name = find(symbol)
    patched = getattr(owner, name)
    assert patched is not patch.originals[symbol], f"{symbol} was never patched"
    setattr(owner, name, patch.originals[symbol])
    try:
        yield
    finally:
        setattr(owner, name, patched)


def two_stages() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import components.engines.megatron.runtime  # noqa: F401  installs the patches

    init_process_group("cpu")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1 + dist.get_rank())


def tied_embeddings(skipped: str | None) -> Any:
    """Return this stage's copy of the tied embedding matrix, or the error of building the model."""
    two_stages()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )
    with without(skipped):
        try:
            chunk = GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=16,
                max_sequence_length=4,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=True,
                position_embedding_type="rope",
            )
        except (AssertionError, RuntimeError) as error:
            return repr(error)
        finally:
            parallel_state.destroy_model_parallel()
    return chunk.shared_embedding_or_output_weight().detach().clone()


def sent_while_freed(skipped: str | None) -> bool:
    """Return whether the second stage receives the right values of a tensor that the first stage has freed.

    The first stage frees it right after the send, as the interleaved schedule does.
    """
    two_stages()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    rank, rounds, intact = dist.get_rank(), 20, True
    tensors = dict.fromkeys(f"tensor_{what}_{side}" for what in ("send", "recv") for side in ("prev", "next"))
    where = {
        "group": parallel_state.get_pipeline_model_parallel_group(),
        "prev_pipeline_rank": 1 - rank,
        "next_pipeline_rank": 1 - rank,
    }
    with without(skipped):
        for _ in range(rounds):
            tensor = torch.full((64,), float(rank == 0))
            mine = {"tensor_send_next": tensor} if rank == 0 else {"tensor_recv_prev": tensor}
            junk = []
            if rank == 0:
                requests = p2p_communication._p2p_ops(**{**tensors, **mine}, **where)
                deallocate_output_tensor(tensor, deallocate_pipeline_outputs=True)
                junk = [torch.full((64,), 7.0) for _ in range(64)]
            dist.barrier()  # the second stage receives late
            if rank == 1:
                requests = p2p_communication._p2p_ops(**{**tensors, **mine}, **where)
            for request in requests.values():
                request.wait()
            intact &= rank == 0 or bool((tensor == 1).all())
            del junk
    parallel_state.destroy_model_parallel()
    return intact


def parts_of_different_sizes(skipped: str | None) -> Any:
    """Return the results of all-gather and reduce-scatter when ranks have 1 and 3 rows, or the error."""
    two_stages()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    group, rank, sizes = dist.group.WORLD, dist.get_rank(), [1, 3]
    with without(skipped):
        try:
            whole = mappings._gather_along_first_dim(torch.full((sizes[rank], 2), float(rank)), group, sizes)
            share = mappings._reduce_scatter_along_first_dim(torch.full((4, 2), rank + 1.0), group, sizes)
        except (RuntimeError, ValueError) as error:
            return repr(error)
        finally:
            parallel_state.destroy_model_parallel()
    return whole[:, 0].tolist(), share.tolist()
