"""Activation widths of MoE blocks on one rank, for both engines, in elements per token of the rank.

A block with experts exchanges and sorts the K copies of its tokens, and holds several copies of them at the
same time: those that autograd saves, and those to which only local variables of the forward pass refer. The
functions below list the tensors at each moment that can be the peak. H is the hidden size, I the width of
this rank's part of an expert, and the load is balanced.
"""

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from components.engines.megatron.layout import Layout
from components.models.experts import BIAS, moe_blocks
from components.preflight.estimates.activation_memory import FP32, MlpActivations, RunShape

ROUNDED_WEIGHTS = ("qwen3_moe",)
"""Families whose routers in transformers return the weights of the chosen experts in the model's dtype. The
weights of others are in fp32, and so are the products of results and weights."""


@dataclass(frozen=True)
class Experts:
    """Sizes of the MoE blocks of a model."""

    number: int
    chosen: float
    """Number of experts per token; on Megatron times ``padding_factor``, if experts are padded to their
    capacity."""
    hidden: int
    inner: int
    """Width of an expert."""
    shared: int
    """Width of the shared experts, 0 if there are none."""
    fp32_router: bool
    """Whether the router computes logits from the hidden state in fp32."""
    fp32_weights: bool
    """Whether the router of transformers returns the weights of experts in fp32."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Experts":
        config = model.config.get_text_config()
        block: Any = next(iter(moe_blocks(model).values()))
        beside = getattr(block, "shared_experts", None)
        return cls(
            number=len(block.experts),
            chosen=config.num_experts_per_tok,
            hidden=config.hidden_size,
            inner=block.experts[0].gate_proj.out_features,
            shared=0 if beside is None else beside.gate_proj.out_features,
            fp32_router=hasattr(block.gate, BIAS),
            fp32_weights=config.model_type not in ROUNDED_WEIGHTS,
        )


def fsdp2_moe(model: PreTrainedModel, run: RunShape, *, tp: int, ep: int) -> MlpActivations:
    """Return the widths of an MoE block of FSDP2 (``engines.fsdp2.grouped_experts``).

    Each of the K copies of a token saves

        the sorted inputs of the experts                             H
        gate and up, the activation of gate, and their product       4I
        the result, for the gradient of the routing weight           H

    and each token its router logits and scores, in fp32, and if the router computes in fp32 also its hidden
    state. Shared experts are an additional MLP, which is computed after the experts.

    The forward pass peaks when results are sent back (with ep: the copies that are sent, those that are
    received and sorted, the results before and after sorting, and those that are received), or when they are
    multiplied by their weights. The backward pass begins with the gradients of this product. Then those of
    the matrices come: of down, with gradients of gate, up and the activation, next of gate and up, with that
    of their input, and last a copy of these, in which gradients of unused experts are 0.
    """
    of = Experts.of(model)
    fp32 = FP32 / run.size
    copy, inner, own = of.chosen * of.hidden, of.chosen * of.inner / tp, of.shared / tp
    product = copy * (fp32 if of.fp32_weights else 1)
    router = 2 * of.number * fp32 + (of.hidden * fp32 if of.fp32_router and run.size < FP32 else 0)
    routed = 2 * copy + 4 * inner
    weighted = (4 if ep > 1 else 3) * copy + product
    exchanged = 6 * copy if ep > 1 else 0
    computed = (3 * copy if ep > 1 else copy) + copy + 3 * inner
    # The input of the block, its first sum, and the input of the first block also exist.
    forward = max(weighted, exchanged) + 3 * of.hidden - 2 * copy - 4 * own
    # Shared experts come first in the backward pass, and the gradient of their input remains. With weights
    # in fp32, the gradient of the sum of the results is in fp32, and that of the results is rounded. The
    # results still exist then, unless they were recomputed.
    rounded = of.fp32_weights and run.size < FP32
    weighing = 2 * product + (of.hidden * fp32 if rounded else 0) + (of.hidden if own else 0) - 4 * own
    return MlpActivations(
        kept=routed + 4 * own + router,
        gradients=max(weighing + (copy if rounded else 0), 2 * own),
        products=max(computed, weighted, exchanged - copy) + router,
        forward=forward,
        again=max(forward, weighing, 2 * own),
        with_gradients=(
            (copy + 6 * inner + router, 1 / 3),
            (2 * copy + 2 * inner + router, 1),
            (copy + router, 5 / 3),
        ),
    )


def megatron_moe(model: PreTrainedModel, layout: Layout, run: RunShape, *, grouped: bool) -> MlpActivations:
    """Return the widths of an MoE block of Megatron, whose tp ranks have the same tokens.

    Each tp rank sends K copies of its part of the tokens, and etp ranks gather each other's copies. Each of
    the gathered copies saves

        the sorted inputs of the experts                             H
        gate and up, and their weighted product (if it is fused)     3I

    The results of experts are not saved, because routing weights multiply the inputs of the last matrix. A
    token saves router scores and, as they are and transposed, the weights of all experts, in fp32, and two
    masks. Shared experts are computed first. The backward pass begins with ``ExchangeWidths.gradients``.
    Then those of the matrices come: of the last one, with gradients of its input and of gate and up, next of
    the first one, with that of its input, and last a copy of these, in which gradients of unused experts are
    0. Each of them is added to the gradient buffer before the next one is computed.

    ``grouped`` is whether the matrices of all experts of a rank are one parameter.
    """
    of, tp = Experts.of(model), layout.tp
    of = replace(of, chosen=of.chosen * layout.padding_factor)
    fp32 = FP32 / run.size
    exchange = (exchange_all if layout.moe_token_dispatcher == "allgather" else exchange_chosen)(
        of, layout, run
    )
    gathered, inner = of.chosen * of.hidden * layout.etp / tp, of.chosen * of.inner / tp
    own = of.shared / tp
    router = (3.5 * of.number * fp32 + (of.hidden * fp32 if of.fp32_router and run.size < FP32 else 0)) / tp
    routed = (3 if layout.fuses_activation(run.device) else 6) * inner + gathered
    others, step = 4 * own + router + exchange.saved, 1 if grouped else layout.ep / of.number
    combined = exchange.combined + (of.hidden / tp if own else 0)
    return MlpActivations(
        kept=routed + others,
        gradients=max(exchange.gradients, 2 * own),
        products=max(combined, exchange.sent + gathered + 3 * inner) + gathered + router,
        forward=combined,
        again=max(combined, exchange.gradients, 2 * own),
        with_gradients=(
            (2 * gathered + 4 * inner + others + exchange.held, step / 3),
            (2 * gathered + 2 * inner + others + exchange.held, step * 2 / 3),
            (gathered + others + exchange.held, step * 4 / 3),
        ),
    )


@dataclass(frozen=True)
class ExchangeWidths:
    """Widths of the exchange of tokens in an MoE block of Megatron, in elements per token of the rank."""

    sent: float
    """Tensors before the experts that local variables hold until the end of the block."""
    combined: float
    """Tensors in addition to those that are saved, when the results of experts are sent back."""
    gradients: float
    """The same in the backward pass."""
    saved: float = 0
    """Tensors saved in addition to those of a rank's own tokens."""
    held: float = 0
    """A buffer that always exists."""


def exchange_chosen(of: Experts, layout: Layout, run: RunShape) -> ExchangeWidths:
    """Return the widths of the all-to-all, in which each copy is sent to the rank of its expert.

    The copies that are sent, and with ep those that are received, exist until the end of the block. After the
    experts, there are their results, sorted by expert and by rank. With etp, they are summed in fp32, in a
    copy, and their gradients are gathered in fp32 and then rounded.
    """
    raised = FP32 / run.size if run.size < FP32 and layout.etp > 1 else 0
    sent = of.chosen * of.hidden / layout.tp
    gathered, received = sent * layout.etp, sent if layout.ep > 1 else 0
    results = gathered * (2 if of.number > layout.ep else 1) + raised * (gathered + sent)
    back = max(2 * sent, 2 * gathered, raised * (sent + gathered), (raised + 1) * gathered * (raised > 0))
    return ExchangeWidths(sent + received, sent + received + results, back)


def exchange_all(of: Experts, layout: Layout, run: RunShape) -> ExchangeWidths:
    """Return the widths of the all-gather of all tokens of the ep x etp ranks.

    The gathered tokens are in a buffer of Megatron that is never freed. The weights of this rank's experts
    are saved twice. The results of experts are added up by token, and are summed over ranks in fp32, in a
    copy, and their gradients are gathered in fp32 and then rounded.
    """
    ranks, fp32 = layout.ep * layout.etp, FP32 / run.size
    if ranks == 1:
        return exchange_chosen(of, layout, run)
    raised = fp32 if run.size < FP32 else 0
    own, copies = of.hidden / layout.tp, of.chosen * of.hidden * layout.etp / layout.tp
    tokens, weights = own * ranks, of.number * ranks / layout.tp * fp32
    combined = tokens + weights + max(copies + tokens, tokens + raised * (tokens + own))
    back = tokens + max(raised * (tokens + own), (raised + 1) * tokens, copies + tokens)
    return ExchangeWidths(tokens, combined, back, saved=2 * weights / layout.ep, held=tokens)
