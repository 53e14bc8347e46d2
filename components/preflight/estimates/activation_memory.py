"""Activation memory of decoder blocks and of the head on one rank, for both engines.

No number is fitted. The activation memory of a block is the set of tensors that autograd saves for the
operators of the engines. Per token, in elements, with hidden size H, query width Q (the heads of the rank),
key-value width K and MLP width I:

    norms of the hidden state   the tensors that each saves (``BlockActivations.norm``), and the 2H inputs of
                                the matrices after two of them
    norms of heads              the same for Q and K, if the architecture has them
    attention                   its inputs, Q + 2K, or 3Q on a GPU without the kernel that computes all
                                sequences of a row (in fp32, in padded rows, or with dropout); its result, Q;
                                logsumexp; and Q again, the input of the output projection, unless one call
                                computes all sequences. Without this kernel, a window needs a mask
    latent attention            for the L latent channels of queries, keys and values: the tensors of their
                                norms, and L inputs of the next matrix. If one kernel computes all sequences,
                                it saves values and results that are padded to the width of keys
    MLP                         gate, its activation, up, and the product of these: 4I; or, without a gate, up
                                and its activation: 2I, unless this is several operators
    experts                     see ``moe_activations``

Compiled blocks and the kernels of liger and transformer-engine save less. Memory of allocators and libraries
is not included.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedConfig

from components.contracts.device import DeviceKind
from components.engines.shared.half_matmul import needs_fp32_products
from components.engines.shared.recomputation import Module
from components.engines.shared.sdpa import CPU_ROWS, CPU_WHOLE
from components.engines.shared.token_log_probs import chunk_size
from components.engines.shared.vocab_parallel import FullVocabulary
from components.models.attention_shape import attention_shape
from components.preflight.estimates.quantities import MicrobatchShape

Recompute = Literal["none", "full", "selective"]
Bytes = dict[str, int]

FP32 = 4


@dataclass(frozen=True)
class RunShape:
    """Properties of the run that determine the activation memory of a given model."""

    dtype: torch.dtype
    device: DeviceKind
    recompute: Recompute
    modules: tuple[Module, ...] = ()
    """Modules of every block that are recomputed if ``recompute`` is ``selective``."""
    tiled_norms: bool = False
    """Whether norms are computed in tiles: they save their input itself, and write only results to memory."""
    packed: bool = True
    """Whether the sequences of a micro-batch are in one row. Otherwise, each is a row that is padded."""
    drops_weights: bool = False
    """Whether attention has dropout."""

    @property
    def size(self) -> int:
        """Bytes per element of an activation."""
        return self.dtype.itemsize

    @property
    def has_kernel(self) -> bool:
        """Whether one kernel computes all sequences of a packed row, instead of one call per sequence."""
        half = self.device == "cuda" and self.dtype != torch.float32
        return half and self.packed and not self.drops_weights

    @property
    def computes_rows_at_once(self) -> bool:
        """Whether FSDP2 computes attention in one call, so that its result is not put together from parts."""
        return self.has_kernel or (self.device != "cpu" and not self.packed)

    @property
    def repeats_heads(self) -> bool:
        """Whether attention saves as many heads of keys and values as of queries (``shared.sdpa``)."""
        return self.device != "cpu" and not self.has_kernel


@dataclass(frozen=True)
class MlpActivations:
    """Activation widths of an MLP on one rank, in elements per token."""

    kept: float
    """Tensors saved for the backward pass."""
    gradients: float
    """Gradients that the backward pass needs at the same time."""
    products: float
    """Tensors that exist at the same time in a forward pass without gradient."""
    forward: float = 0
    """Tensors of a forward pass with gradients that exist in addition to ``kept`` at its peak."""
    again: float = 0
    """Tensors in addition to ``kept`` at the peak of a backward pass that begins with that forward pass. 0
    means ``gradients``."""
    with_gradients: tuple[tuple[float, float], ...] = ()
    """For each moment of the backward pass at which gradients of expert matrices exist: the tensors, in place
    of ``kept``, and the size of these gradients as a multiple of the matrices."""


def ungated_mlp(intermediate: int, kept: int, gradients: int) -> MlpActivations:
    """Return the widths of a dense MLP without a gate, for the numbers of tensors of its activation."""
    return MlpActivations(kept * intermediate, gradients * intermediate, min(max(kept, 2), 3) * intermediate)


def mlp_activations(intermediate: int, kept: int = 4) -> MlpActivations:
    """Return the widths of a dense MLP that saves ``kept`` tensors of width ``intermediate``."""
    return MlpActivations(kept * intermediate, 2 * intermediate, 3 * intermediate)


@dataclass(frozen=True)
class BlockActivations:
    """The part of a decoder block on one rank; widths are in elements per token of the rank."""

    run: RunShape
    hidden: int
    norms: int
    """Number of norms over the hidden size."""
    norm_input: int
    """Bytes per element of the input that a norm saves: in fp32, or in ``run.dtype`` if it is the input
    itself."""
    norm_product: int
    """Bytes per element of a norm's result before the multiplication by its weight, if it is saved."""
    normed_heads: int
    """Width of queries and keys if they have their own norms, otherwise 0."""
    attended: int
    """Total width of the queries, keys and values that attention saves."""
    result: int
    """Width of the result of attention."""
    copied: int
    """Width of results that attention saves and then copies; or total width of values and results that it
    pads to the width of keys."""
    heads: int
    mlp: MlpActivations
    latent: int
    """Latent width of queries, keys and values in multi-head latent attention, otherwise 0."""
    masks: int
    """Bytes of the attention masks of a micro-batch."""
    norm_gradients: int = 0
    """Bytes per element that the backward pass of a norm needs at the same time. 0 means few."""
    dora: int = 0
    """Width of the results of matrices with a learned norm, and of their adapters, which DoRA saves."""
    dora_products: int = 0
    """Elements of all matrices from which DoRA computes the norms of one weight; maximum over the weights."""
    dropout: int = 0
    """Bytes per token that dropout before adapters saves."""
    mlp_adapter_bytes: float = 0
    """Bytes per token that adapters save in the MLP, as counted in ``dora`` and ``dropout``."""
    kind: Literal["mlp", "moe"] = "mlp"
    """Whether the MLP is dense or has experts."""
    is_mtp: bool = False
    """Whether the block predicts a later token (MTP): it also saves embeddings, and has three more norms."""

    @property
    def norm(self) -> int:
        """Bytes that a norm saves per element."""
        return self.norm_input + self.norm_product

    def not_recomputed(self) -> "BlockActivations":
        return replace(self, run=replace(self.run, recompute="none"))

    def attention(self, tokens: int) -> int:
        """Return the bytes that attention saves besides its inputs, unless it is recomputed."""
        return tokens * (self.copied * self.run.size + self.heads * FP32) + self.masks

    def full_attention(self, tokens: int) -> int:
        """Return the bytes saved without recomputation."""
        norms = ((self.norms + 3 * self.is_mtp) * self.hidden + self.normed_heads + self.latent) * self.norm
        matrices = (2 + 2 * self.is_mtp) * self.hidden + self.latent + self.result + self.mlp.kept + self.dora
        widths = norms + (matrices + self.attended) * self.run.size + self.dropout
        return int(tokens * widths) + self.attention(tokens)

    def saved(self, tokens: int) -> int:
        """Return the bytes that the forward pass saves for the backward pass."""
        if self.run.recompute == "full":
            return tokens * (1 + self.is_mtp) * self.hidden * self.run.size
        return self.full_attention(tokens) - sum(self.recomputed(tokens))

    def recomputed(self, tokens: int) -> list[int]:
        """Return the bytes that each of ``run.modules`` in this block saves, if it is not recomputed."""
        of_mlp = tokens * (self.mlp.kept * self.run.size + self.mlp_adapter_bytes)
        sizes: dict[str, int] = {"core_attn": self.attention(tokens), self.kind: int(of_mlp)}
        return [sizes[name] for name in self.run.modules if name in sizes]

    def backward(self, tokens: int) -> int:
        """Return the bytes that the backward pass needs in addition: recomputed activations and gradients."""
        return max(self.backward_of_mlp(tokens), self.backward_of_norm(tokens))

    def backward_of_mlp(self, tokens: int) -> int:
        """Return the bytes in the MLP, where the gradients usually peak.

        Those of the block's result, of gate and of up exist, and the product of gate and up has been freed
        (for other MLPs, see ``MlpActivations.gradients``). An MTP layer begins with its last norm.
        """
        begins_again = self.run.recompute == "full" or self.kind in self.run.modules
        of_mlp = self.mlp.again or self.mlp.gradients if begins_again else self.mlp.gradients
        gradients = (self.hidden + of_mlp) * self.run.size
        if self.is_mtp:
            gradients = max(gradients, self.hidden * self.norm_gradients)
        return self.again(tokens) + int(tokens * gradients)

    def backward_of_experts(self, tokens: int, matrices: int) -> int:
        """Return the bytes when gradients of expert matrices, ``matrices`` elements in all, exist."""
        moments = (
            tokens * (self.hidden + tensors - self.mlp.kept) + share * matrices
            for tensors, share in self.mlp.with_gradients
        )
        return self.again(tokens) + int(max(moments) * self.run.size)

    def moe_forward_peak(self, tokens: int) -> int:
        """Return the bytes at the peak of the forward pass of a block with experts.

        They are those of its saved tensors and of its temporaries, before anything is recomputed.
        """
        if self.run.recompute == "full":
            return self.saved(tokens) + self.forward(tokens)
        temporaries = self.mlp.products if self.kind in self.run.modules else self.mlp.forward
        return self.saved(tokens) + int(tokens * temporaries * self.run.size)

    def backward_of_norm(self, tokens: int) -> int:
        """Return the bytes in the backward pass of the norm before the MLP, the peak if the MLP is narrow.

        All tensors of the MLP have been freed. With DoRA, the peak may instead be just before this backward
        pass, when there are no gradients yet.
        """
        freed = self.mlp.kept * self.run.size + self.hidden * (self.norm_product + self.run.size)
        of_norm = self.hidden * self.norm_gradients - freed
        gradients = int(tokens * (self.hidden * self.run.size + of_norm))
        dora = self.dora_products * self.run.size
        # Less than 0 if the MLP has freed more than the gradients take.
        return self.again(tokens) + (max(gradients, dora) if dora else gradients)

    def again(self, tokens: int) -> int:
        """Return the bytes of recomputed activations that exist at the same time.

        The inputs of an MTP layer are not among them if its norms save them in fp32.
        """
        if self.run.recompute == "full":
            copied = self.is_mtp and self.norm_gradients and self.run.size < self.norm_input
            return self.full_attention(tokens) - (0 if copied else self.saved(tokens))
        return max(self.recomputed(tokens), default=0)  # one module after the other

    def forward(self, tokens: int) -> int:
        """Return the bytes at the peak of a pass without gradient.

        The peak is assumed to be in the MLP, where three tensors of the hidden size, around a norm, exist at
        the same time as ``mlp.products``.
        """
        return int(tokens * (3 * self.hidden + self.mlp.products)) * self.run.size


def mask_bytes(shape: MicrobatchShape, run: RunShape, config: PreTrainedConfig) -> int:
    """Return the bytes of the masks of a row of a micro-batch, of which torch's CPU kernel gets views.

    On a CPU, this is an upper bound if the row is one sequence, or if there is a window. If a row has several
    sequences, each has a mask, and together they are as wide. On a GPU, masks exist only without the kernel
    for packed rows, in layers with a window that is shorter than the longest sequence. The result is then
    the mean over all layers or, if attention is recomputed, the mask of one layer, because only one exists at
    a time. It is an upper bound if the row has several sequences. Masks of shared prompts are not included.
    """
    text, longest = config.get_text_config(), shape.length
    of, window = attention_shape(config), getattr(text, "sliding_window", None) or longest
    if run.device != "cpu":
        sequence = shape.longest_sequence or longest
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
        again = run.recompute == "full" or "core_attn" in run.modules
        share = 1.0 if again else kinds.count("sliding_attention") / len(kinds)
        return int(share * longest * sequence * run.size) if window < sequence and not run.has_kernel else 0
    limit = CPU_ROWS[run.size]
    may_be_whole = of.key == of.value and not getattr(config, "attention_dropout", 0)
    cut = longest > limit and not (may_be_whole and limit >= CPU_WHOLE[run.size])
    return min(longest, limit) * longest * run.size if cut or window < longest else 0


def head_activations(
    labels: int, hidden: int, vocabulary: int, run: RunShape, *, trained: bool, ends: bool = True
) -> Bytes:
    """Return the bytes for log-probabilities of ``labels`` positions over ``vocabulary`` rows of the head.

    The logits of only one chunk exist at a time: on a CUDA GPU in ``run.dtype``; elsewhere in fp32, with a
    copy in ``run.dtype`` if this is lower. This is an upper bound on a CPU whose vocabulary is not split,
    where fp32 logits exist only for a small block. In a lower dtype, the fp32 gradient of a ``trained`` head
    is copied to it in the end, when a CUDA GPU has no logits any more. Elsewhere, the gradient from one chunk
    is such a matrix, too, and a CPU may convert the weight to fp32 for the product. Rows of the hidden state
    are copied and have a gradient. Without ``ends``, these are the bytes before that copy, which is made in
    the backward pass.
    """
    fused = run.device == "cuda"
    logits_dtype = run.dtype if fused else torch.float32
    chunk = min(chunk_size(FullVocabulary(vocabulary), torch.device(run.device), logits_dtype), labels)
    cast = 0 if run.dtype == torch.float32 else run.size
    copied, logits = hidden * cast if trained else 0, chunk * (run.size if fused else FP32 + cast)
    if fused:
        logits, copied = (0, copied) if ends and copied > logits else (logits, 0)
    return {
        "logits": logits * vocabulary,
        "gradients": copied * vocabulary,
        "activations": 2 * labels * hidden * run.size,
        "converted": vocabulary * hidden * FP32 if needs_fp32_products(run.device, run.dtype) else 0,
    }


def kept_by_head(labels: int, row: int, trained: int) -> Bytes:
    """Return the bytes that the head saves for its backward pass, with ``trained`` trained parameters.

    Its gradients are computed in the forward pass: that of the weight, in fp32, and those of the ``labels``
    rows of the hidden state that have a label, of ``row`` bytes each, which are also copied.
    """
    return {"gradients": trained * FP32, "activations": 2 * labels * row}


def peak(moments: Iterable[Mapping[str, int]]) -> Bytes:
    """Return the parts of the moment in time with the largest total, without zero entries."""
    most = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in most.items() if size}


def add_by_name(*parts: Mapping[str, int]) -> Bytes:
    """Return the sums of all parts by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
