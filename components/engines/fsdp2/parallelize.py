"""From a description of a model to its sharded module, and back to whole tensors."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.attention import ATTENTION, ATTENTION_RECOMPUTED
from components.engines.fsdp2.adapter import inject, name_on_disk
from components.engines.fsdp2.context import Context
from components.engines.fsdp2.execution import choose, fuse
from components.engines.fsdp2.mesh import SHARD, TENSOR, data_mesh, part, stored
from components.engines.fsdp2.tensor_parallel import local, parallelize, vocabulary_shard
from components.engines.logps import token_stats
from components.engines.vocabulary import VocabularyShard
from components.models import ModelSpec, WeightSource, materialize_buffers
from runner.errors import ConfigError
from runner.protocols import IGNORE, Batch, Kernels

if TYPE_CHECKING:
    from components.engines.fsdp2.spec import FSDP2


class Scorer(nn.Module):
    """A causal language model that answers with per-token statistics of the labels, never with logits.

    It is the root of the sharding: the head's weight is read directly, so no module below may own it.
    """

    lm: PreTrainedModel

    def __init__(self, lm: PreTrainedModel, context: Context) -> None:
        super().__init__()
        self.lm, self.context = lm, context
        self.vocabulary: VocabularyShard | None = None
        """With tensor parallelism: which rows of the head are here."""
        self.kernels: Literal["torch", "liger"] = "torch"

    def forward(
        self, batch: Batch, requires: frozenset[str], weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The fields of ``TokenStats``, as a tuple because FSDP hooks the tensors of a tuple only."""
        own, length = self.context.own, batch.labels.shape[1]
        hidden = self.lm.base_model(
            input_ids=own(batch.input_ids),
            position_ids=own(batch.position_ids),
            use_cache=False,
            **self.context.attention_kwargs(batch),
        ).last_hidden_state
        head = self.lm.get_output_embeddings()
        stats = token_stats(
            hidden,
            local(head.weight),
            own(batch.labels, IGNORE),
            head_bias=local(head.bias),
            requires=requires,
            weights=None if weights is None else own(weights),
            # Of a share of the row the host does not know them.
            label_index=batch.labelled() if self.context.cp == 1 else None,
            shard=self.vocabulary,
        )
        whole = self.context.whole
        return whole(stats.logps, length), whole(stats.logsumexp, length), whole(stats.mean_logp, length)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their names on disk, tied ones once.

        A module that an adapter trains whole comes twice: frozen as it was, and as it is trained.
        """
        return ((name_on_disk(name), parameter) for name, parameter in self.lm.named_parameters())


def build_scorer(
    spec: ModelSpec,
    weights: WeightSource,
    mesh: DeviceMesh,
    layout: "FSDP2",
    *,
    seed: int,
    context: Context,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool,
    kernels: Kernels,
    trainable: bool,
    adapter: LoRA | None = None,
) -> Scorer:
    """The model sharded over ``mesh``, block by block, holding ``weights``.

    What is trained keeps fp32 shards (the master weights), is computed in ``dtype`` and has its gradients
    reduced in fp32; what is frozen is stored in ``dtype``: the model itself where there is an ``adapter``,
    whose own initial values may depend on ``seed``. Peak memory is the shard and this rank's part of one
    tensor.
    """
    # A frozen model keeps nothing for a backward pass.
    recompute = layout.activation_checkpointing if trainable else "none"
    attention = ATTENTION_RECOMPUTED if recompute == "selective" else ATTENTION
    scorer = Scorer(spec.build(spec.config(), attention=attention), context)
    if adapter is not None:
        inject(scorer.lm, adapter)  # before anything is split
    scorer.kernels = choose(kernels, scorer.lm, device.type, compiled=compiled)
    if scorer.kernels == "liger":
        fuse(scorer.lm)
    for block in blocks(scorer.lm):
        if compiled:
            # Inside the hooks of FSDP, which then run as they are; the blocks share their compiled code.
            block.forward = torch.compile(block.forward)
        if recompute == "full":
            recompute_in_backward(block)
    if not trainable:
        scorer.requires_grad_(False)
    for parameter in scorer.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if layout.tp > 1:
        parallelize(scorer.lm, mesh[TENSOR])
        scorer.vocabulary = vocabulary_shard(scorer.lm.config.vocab_size, mesh.get_group(TENSOR))
    shard(scorer, mesh, layout, dtype)
    scorer.to_empty(device="cpu" if layout.cpu_offload else device)
    materialize_buffers(scorer.lm, device)
    trained = weights if adapter is None else adapter.weights(spec.build(spec.config()), seed, weights)
    for name, parameter in scorer.named_weights():
        copy_part(parameter, name, trained if parameter.requires_grad else weights)
    return scorer.train(trainable)


def shard(scorer: Scorer, mesh: DeviceMesh, layout: "FSDP2", dtype: torch.dtype) -> None:
    """``fully_shard`` on every block, then on the root, with gradients summed instead of averaged."""
    # Inputs are ids, labels and fp32 weights of labels: casting those would round the loss.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": data_mesh(mesh), "mp_policy": policy}
    options["shard_placement_fn"] = partial(shard_dimension, shards=mesh[SHARD].size())
    if layout.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in blocks(scorer.lm):
        fully_shard(block, reshard_after_forward=layout.reshard_after_forward, **options)
    fully_shard(scorer, **options)
    for module in fsdp_modules(scorer):
        # The engine divides once, at the end of the step; a factor of 1 alone is not a plain sum on gloo.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def shard_dimension(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Which dimension FSDP cuts; None: rows.

    Where tensor parallelism left its ranks unequal numbers of rows, columns: torch would be wrong about which
    rows of the whole a shard of them holds.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None
    rows, *others = parameter.shape
    if rows % parameter.device_mesh.size() == 0:
        return None
    (columns,) = others
    assert columns % shards == 0, "tensor_parallel.check has looked at the columns"
    return Shard(1)


def recompute_in_backward(block: nn.Module) -> None:
    """Keeps a block's input alone; the backward pass computes the rest again, with the same dropout.

    Inside the hooks of FSDP, so that these run once; parameters keep their names.
    """
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed


def blocks(lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks, as transformers itself names them (``_no_split_modules``).

    Raises:
        ConfigError: it names none.
    """
    names = set(lm._no_split_modules or ())
    found = [module for module in lm.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"model: {type(lm).__name__} names no decoder block to shard (_no_split_modules); "
            "choose a model that transformers itself can split."
        )
    return found


def fsdp_modules(scorer: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in scorer.modules() if isinstance(module, FSDPModule))


@torch.no_grad()
def copy_part(parameter: Tensor, name: str, weights: WeightSource) -> None:
    """Copies this rank's part of the weight ``name`` into ``parameter``; reads no other, sends nothing."""
    index = part(parameter)
    if all(piece.stop > piece.start for piece in index):
        stored(parameter).copy_(weights(name, index))


def release(scorer: Scorer) -> None:
    """Frees the gathered weights that a forward without backward leaves: no update would reach them."""
    for module in fsdp_modules(scorer):
        module.reshard()


def discard_iteration(scorer: Scorer) -> None:
    """Forgets a forward or backward that did not finish, and every gradient not reduced yet.

    FSDP's own reset keeps what ``set_requires_gradient_sync(False)`` has accumulated in the unsharded
    parameters, which no public call can drop.
    """
    assert isinstance(scorer, FSDPModule)
    state = scorer._get_fsdp_state()
    if state._is_root is None:
        return  # no forward has run yet
    if hasattr(scorer, "reset_iter_state"):
        scorer.reset_iter_state()
    else:
        reset_by_hand(state)
    release(scorer)
    for module in fsdp_modules(scorer):
        for group in param_groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def reset_by_hand(root: Any) -> None:
    """``reset_iter_state`` for torch before 2.13, which has none."""
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        for group in param_groups(state):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def param_groups(state: Any) -> list[Any]:
    """A list since torch 2.13; one or none before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if groups is None else groups
