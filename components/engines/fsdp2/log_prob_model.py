"""The root module of FSDP2: a causal language model that returns per-token statistics."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.contracts.batch import IGNORE
from components.contracts.json_types import Json
from components.contracts.loss import TokenStats
from components.engines.fsdp2.compile import ChosenKernels
from components.engines.fsdp2.context_parallel import ContextParallel, ModelInput
from components.engines.fsdp2.fsdp_private import InPlaceReduceScatter
from components.engines.fsdp2.grouped_experts import (
    ExpertAdapter,
    GroupedExperts,
    grouped_experts,
)
from components.engines.fsdp2.lora import (
    name_on_disk,
)
from components.engines.fsdp2.mesh import (
    without_wrapper,
)
from components.engines.fsdp2.moe_router_hooks import RouterHooks
from components.engines.fsdp2.mtp import MTPHead
from components.engines.fsdp2.param_views import ParamView
from components.engines.fsdp2.tensor_parallel import CopyToTP, local
from components.engines.shared.activation_offloading import ActivationOffloading
from components.engines.shared.adapter_dropout import TokenHashes, dropout_hashes
from components.engines.shared.neftune import NO_NOISE, NoisyEmbedding
from components.engines.shared.token_hash import token_hashes
from components.engines.shared.token_log_probs import scalar_stats, token_stats
from components.engines.shared.vocab_parallel import VocabularyShard
from components.models import nf4
from components.models.scalar_head import has_scalar_head, output_head


class LogProbModel(nn.Module):
    """A causal language model whose outputs are per-token statistics of the labels instead of logits.

    It is the root FSDP module. The weight of the head is read directly, so no other FSDP module may own it.
    """

    lm: PreTrainedModel

    def __init__(self, lm: PreTrainedModel, context: ContextParallel) -> None:
        super().__init__()
        self.lm, self.context, self.mtp_head = lm, context, MTPHead(lm)
        self.routing: RouterHooks | None = None
        """Hooks on the MoE routers. None means that the model has no experts or is not trained."""
        self.neftune, self.noise = NO_NOISE, NoisyEmbedding()
        self.hashes = TokenHashes()
        self.dropout_seed: int | None = None
        """Seed of the masks of adapter dropout. None means that the adapter has no dropout."""
        self.vocabulary: VocabularyShard | None = None
        """This rank's rows of the head. None means that there is no tensor parallelism."""
        self.kernels: ChosenKernels = "torch"
        self.offloading: ActivationOffloading | None = None
        self.in_place_reduction: InPlaceReduceScatter | None = None
        """The memory of reductions of gradients. None means FSDP's own."""
        self.float8: Json = {}
        """Description by ``float8.convert``. Empty means that no product is in float8."""

    def forward(
        self,
        given: ModelInput,
        requires: frozenset[str],
        weights: Tensor | None,
        mtp: Sequence[ModelInput] = (),
        factor: float = 1.0,
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of ``TokenStats``, as a tuple because FSDP adds hooks to tensors of a tuple only.

        The ``logps`` of each input of ``mtp``, one per MTP depth (see ``MTPConfig``), follow them. If ``mtp``
        is empty, the MTP layers are not computed. The caller multiplies the loss by ``factor`` before the
        backward pass.
        """
        own, batch = self.context.shard, given.batch
        length = batch.labels.shape[1]
        if self.routing is not None and torch.is_grad_enabled():
            self.routing.see(batch)
        if self.neftune.alpha and torch.is_grad_enabled():
            keys, spread = self.neftune.noise_of(batch)
            self.noise.given = own(keys), own(spread)
        if self.dropout_seed is not None and self.training:
            self.hashes.values = dropout_hashes(own(token_hashes(batch, self.dropout_seed)))
        hidden = self.lm.base_model(
            input_ids=own(batch.input_ids),
            position_ids=own(batch.position_ids),
            use_cache=False,
            **given.attention,
        ).last_hidden_state
        stats = self._stats(hidden, given, requires, None if weights is None else weights * factor)
        found = chain(vars(stats).values(), self._mtp(hidden, mtp, factor))
        return tuple(self.context.gather(values, length) for values in found)

    def _stats(
        self, hidden: Tensor, given: ModelInput, requires: frozenset[str], weights: Tensor | None
    ) -> TokenStats:
        """Compute the statistics of this rank's positions."""
        head, own = output_head(self.lm), self.context.shard
        assert has_scalar_head(self.lm) == ("values" in requires), "a loss of values has no log-probabilities"
        if "values" in requires:
            return scalar_stats(hidden, local(head.weight))
        return token_stats(
            hidden,
            local(head.weight),
            own(given.batch.labels, IGNORE),
            head_bias=local(head.bias),
            requires=requires,
            weights=None if weights is None else own(weights),
            label_index=given.label_index,
            shard=self.vocabulary,
        )

    def _mtp(self, hidden: Tensor, depths: Sequence[ModelInput], factor: float) -> Iterator[Tensor]:
        """Yield the ``logps`` of this rank's positions by MTP depth."""
        if not depths:
            return
        ids = [self.context.shard(depth.batch.input_ids) for depth in depths]
        for state, depth in zip(self.mtp_head(hidden, ids, self._embed), depths, strict=True):
            weights = (depth.batch.labels != IGNORE) * factor
            yield self._stats(state, depth, frozenset(), weights).logps

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ``ids`` for an MTP layer, which tensor-parallel ranks may split."""
        embedded: Tensor = self.lm.get_input_embeddings()(ids)
        return embedded if self.vocabulary is None else CopyToTP.apply(embedded, self.vocabulary.group)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names on disk.

        Tied parameters occur once. A module that an adapter trains in full occurs twice: the frozen original
        and the trained copy.
        """
        return ((name_on_disk(name), parameter) for name, parameter in self.lm.named_parameters())

    def sizes(self) -> dict[str, int]:
        """Return the number of elements over all ranks, by the names of ``named_weights``."""
        grouped = grouped_experts(self.lm).values()
        parts = {parameter: module.parts for module in grouped for parameter in module.parameters()}
        linears = (module for module in self.lm.modules() if isinstance(module, nf4.NF4Linear))
        whole = {module.weight: module.shape.numel() for module in linears}
        return {name: whole.get(p, p.numel() * parts.get(p, 1)) for name, p in self.named_weights()}

    def members(self) -> Iterator[ParamView]:
        """Yield the tensors in ``named_weights`` on this rank, in their order, with experts one by one."""
        first = dist.get_rank() == 0
        for name, parameter in self.lm.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if isinstance(module := self.lm.get_submodule(owner), GroupedExperts | ExpertAdapter):
                yield from module.members(leaf)
            else:
                yield ParamView(name_on_disk(name), parameter, without_wrapper, writes=first)
