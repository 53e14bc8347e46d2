"""How much memory the parts of a model take on one rank: the arithmetic that both engines share.

Nothing here is fitted. What a block keeps for its backward pass is what autograd saves of the operators that
the engines run: per token, in elements, with hidden size H, query width Q (the heads of the rank), key-value
width K and MLP width I,

    norms of the hidden state   what each computes from, and its result (``Block.norm``), and the 2H that the
                                matrices after two of them keep
    norms of heads              the same of Q and K, where the architecture has them
    attention                   Q + 2K that it is given; its result, Q; logsumexp; and Q once more, which the
                                matrix after it keeps, unless one kernel computes all sequences
    latent attention            of the channels L that queries, keys and values are made of, what their norms
                                keep, and L that the next matrix does
    MLP                         gate, its activation, up, and the product of these: 4I
    experts                     see ``shape.experts``

Compiled blocks, and the kernels of liger and transformer-engine, keep less. Packed rows are taken for one
sequence each, whose masks are the largest (CPU). What allocators and libraries keep beside is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from components.engines.shared.sdpa import CPU_ROWS
from components.engines.shared.token_log_probs import chunk_size
from components.engines.shared.vocab_parallel import FullVocabulary

Recompute = Literal["none", "full", "selective"]
Bytes = dict[str, int]

FP32 = 4


@dataclass(frozen=True)
class RunShape:
    """What activations depend on beside the model."""

    dtype: torch.dtype
    device: Literal["cpu", "cuda"]
    recompute: Recompute

    @property
    def size(self) -> int:
        """Bytes of an element of an activation."""
        return self.dtype.itemsize

    @property
    def has_kernel(self) -> bool:
        """Whether one kernel computes all sequences of a packed row, in place of one call a sequence."""
        return self.device == "cuda" and self.dtype == torch.bfloat16


@dataclass(frozen=True)
class MlpActivations:
    """Widths, in elements of one token of the rank."""

    kept: float
    """What it keeps for its backward pass."""
    gradients: float
    """What that takes beside."""
    products: float
    """What there is at once where nothing is kept."""


def mlp_activations(intermediate: int, kept: int = 4) -> MlpActivations:
    """``kept``: tensors of its width that it keeps."""
    return MlpActivations(kept * intermediate, 2 * intermediate, 3 * intermediate)


@dataclass(frozen=True)
class BlockActivations:
    """A decoder block as one rank computes it; widths are elements of one of its tokens."""

    run: RunShape
    hidden: int
    norms: int
    """How many are over the hidden size."""
    norm: int
    """Bytes that a norm keeps of an element: what it computes from, in fp32, and its result before the weight
    (if that is trained)."""
    normed_heads: int
    """Width of the queries and keys that have norms of their own; 0 where they have none."""
    attended: int
    """Width of queries, keys and values together, as attention keeps them."""
    result: int
    """Width of what the heads attend to."""
    heads: int
    mlp: MlpActivations
    latent: int
    """Width of what queries, keys and values are made of, in latent attention."""
    masks: int
    """Bytes, of a micro-batch."""

    def attention(self, tokens: int) -> int:
        """What attention keeps beside its arguments; nothing of it where it is recomputed."""
        result = 0 if self.run.has_kernel else self.result * self.run.size
        return tokens * (result + self.heads * FP32) + self.masks

    def full_attention(self, tokens: int) -> int:
        """What the backward pass needs."""
        norms = (self.norms * self.hidden + self.normed_heads + self.latent) * self.norm
        matrices = 2 * self.hidden + self.latent + self.result + self.mlp.kept
        return int(tokens * (norms + (matrices + self.attended) * self.run.size)) + self.attention(tokens)

    def saved(self, tokens: int) -> int:
        """What is kept of it from the forward pass to the backward pass."""
        if self.run.recompute == "full":
            return tokens * self.hidden * self.run.size
        return self.full_attention(tokens) - (
            self.attention(tokens) if self.run.recompute == "selective" else 0
        )

    def backward(self, tokens: int) -> int:
        """What its backward pass takes beside: what is computed again, and gradients.

        Those are, at most, of the block's result and of its MLP's gate and up, when the product of these has
        been let go, but for its own (``Mlp.gradients``).
        """
        again = self.full_attention(tokens) - self.saved(tokens)
        return again + int(tokens * (self.hidden + self.mlp.gradients) * self.run.size)

    def forward(self, tokens: int) -> int:
        """Where nothing is kept: the MLP's products beside the hidden state, before and after its norm."""
        return int(tokens * (3 * self.hidden + self.mlp.products)) * self.run.size


def mask_bytes(longest: int, run: RunShape) -> int:
    """Bytes, for one sequence: torch's CPU kernel is given some queries at a time, and a mask of the keys."""
    if run.device == "cuda":
        return 0
    rows = CPU_ROWS[run.size]
    ends = (min(begin + rows, longest) for begin in range(rows, longest, rows))
    return sum((end - (end - 1) // rows * rows) * end for end in ends) * run.size


def head_activations(labels: int, hidden: int, vocabulary: int, run: RunShape) -> Bytes:
    """Log-probabilities of ``labels`` positions over ``vocabulary`` rows of the head, and their gradients.

    Of the fp32 logits two chunks meet: the next one, and the one before it until then. Rows of the hidden
    state are copied, and have a gradient.
    """
    chunk = min(chunk_size(FullVocabulary(vocabulary), torch.device(run.device)), labels)
    cast = 0 if run.dtype == torch.float32 else chunk * vocabulary * run.size
    return {
        "logits": min(2 * chunk, labels) * vocabulary * FP32 + cast,
        "activations": 2 * labels * hidden * run.size,
    }


def peak(moments: Iterable[Mapping[str, int]]) -> Bytes:
    """The one that takes most, without what takes nothing."""
    most = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in most.items() if size}


def add_by_name(*parts: Mapping[str, int]) -> Bytes:
    """Added up by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
