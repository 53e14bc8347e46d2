"""Megatron's MTP layers (``components.models.mtp``), with token ids that are already shifted.

Megatron's own layers shift token ids by communication between context-parallel ranks, one sequence of a row
at a time.
"""

from collections.abc import Callable

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class MTPLayer(MultiTokenPredictionLayer):
    """The MTP layer of one depth, called together by all tp and cp ranks of the last pipeline stage."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embed ``input_ids``, which are already shifted for this depth."""
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return input_ids, position_ids, embedded, hidden

    def _checkpointed_forward(
        self,
        forward_func: Callable[..., Tensor],
        hidden_states: Tensor,
        decoder_input: Tensor,
        **others: object,
    ) -> Tensor:
        """Checkpoint the layer; Megatron's version accepts only tensors, and not ``packed_seq_params``."""

        def forward(hidden: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embedded, **others)

        kept: Tensor = tensor_parallel.checkpoint(forward, False, hidden_states, decoder_input)
        return kept


def mtp_spec(
    config: TransformerConfig, decoder: TransformerBlockSubmodules, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the specs of this chunk's MTP layers, built like the last layer of ``decoder``, or None."""
    number = get_mtp_num_layers_to_build(config, vp_stage=vp_stage)
    if not number:
        return None
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        transformer_layer=decoder.layer_specs[-1],
        layer_norm=WrappedTorchNorm,
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(MTPLayer, submodules=parts)] * number)
