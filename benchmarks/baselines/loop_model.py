"""A hand-written Qwen3 model for packed sequences only.

Tensors have no batch dimension: ``[T, ...]``, with all sequences end to end.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
EMBEDDING = "model.embed_tokens.weight"
CHUNK = 512
"""Number of positions whose logits are in memory at the same time."""


@dataclass(frozen=True)
class Shape:
    """Sizes and constants from the config.json of a model folder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    theta: float

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocabulary=config["vocab_size"],
            eps=config["rms_norm_eps"],
            theta=rope["rope_theta"],
        )


@dataclass(frozen=True)
class Span:
    """One sequence, positions ``begin`` to ``end``, that also attends to all positions of ``prefix``."""

    begin: int
    end: int
    prefix: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def pairs(self) -> float:
        """Approximate number of query-key pairs that the causal mask keeps."""
        shared = 0 if self.prefix is None else self.prefix[1] - self.prefix[0]
        return self.length**2 / 2 + self.length * shared


class Model:
    """A model that computes hidden states from given weights, keyed by their Hugging Face names.

    With ``compile``, everything except attention is compiled for dynamic lengths.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, *, longest: int, compile: bool) -> None:
        self.shape = shape
        rates = shape.theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(longest).float(), rates)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.before: Callable[..., Any] = self._before_attention
        self.after: Callable[..., Any] = self._after_attention
        if compile:
            self.before = torch.compile(self.before, dynamic=True)
            self.after = torch.compile(self.after, dynamic=True)

    def hidden(self, weights: Weights, ids: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """Return the hidden states ``[T, hidden]`` after the last norm."""
        x = F.embedding(ids, weights[EMBEDDING])
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index in range(self.shape.layers):
            layer = layer_weights(weights, index)
            q, k, v = self.before(x, layer, cos, sin)
            x = self.after(x, attention(q, k, v, spans), layer)
        return self._norm(x, weights["model.norm.weight"])

    def flops(self, spans: Sequence[Span], num_labels: int, *, passes: int) -> float:
        """Return the FLOPs of ``passes`` over the sequences ``spans``, with ``num_labels`` labels.

        ``passes`` counts 1 for a forward pass and 2 for a backward pass.
        """
        s = self.shape
        projections = 2 * s.hidden * s.head_dim * (s.heads + s.kv_heads)
        linear = s.layers * (projections + 3 * s.hidden * s.intermediate)
        attended = s.layers * 2 * s.heads * s.head_dim * sum(span.pairs for span in spans)
        tokens = sum(span.length for span in spans)
        return passes * 2 * (tokens * linear + num_labels * s.vocabulary * s.hidden + attended)

    def _before_attention(
        self, x: Tensor, layer: Weights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = self.shape.head_dim
        y = self._norm(x, layer["input_layernorm"])
        q = self._norm(
            F.linear(y, layer["self_attn.q_proj"]).unflatten(1, (-1, dim)), layer["self_attn.q_norm"]
        )
        k = self._norm(
            F.linear(y, layer["self_attn.k_proj"]).unflatten(1, (-1, dim)), layer["self_attn.k_norm"]
        )
        v = F.linear(y, layer["self_attn.v_proj"]).unflatten(1, (-1, dim))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _after_attention(self, x: Tensor, attended: Tensor, layer: Weights) -> Tensor:
        x = x + F.linear(attended.flatten(1), layer["self_attn.o_proj"])
        y = self._norm(x, layer["post_attention_layernorm"])
        gate = F.silu(F.linear(y, layer["mlp.gate_proj"]))
        return x + F.linear(gate * F.linear(y, layer["mlp.up_proj"]), layer["mlp.down_proj"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.eps)


def layer_weights(weights: Weights, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}."
    names = (name for name in weights if name.startswith(prefix))
    return {name.removeprefix(prefix).removesuffix(".weight"): weights[name] for name in names}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> Tensor:
    """Compute causal attention with one call per span, instead of one call with a mask for all spans."""
    return torch.cat([attend(q, k, v, span) for span in spans])


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
    own, mask = slice(span.begin, span.end), None
    keys, values = k[own], v[own]
    if span.prefix is not None:
        shared = slice(*span.prefix)
        keys, values = torch.cat((k[shared], keys)), torch.cat((v[shared], values))
        mask = torch.ones(span.length, len(keys), dtype=torch.bool).tril(len(keys) - span.length)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q[own], keys, values))
    attended = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


class CrossEntropy(torch.autograd.Function):
    """``-sum(log p(label)) * scale``, with both gradients computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Compute the loss from ``hidden [N, hidden]``, ``head [vocabulary, hidden]`` and ``labels [N]``."""
        loss = torch.zeros(())
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        for part in chunks(len(labels)):
            p = torch.softmax(hidden[part] @ head.t(), -1)
            at = torch.arange(len(p)), labels[part]
            loss -= p[at].float().clamp_min(1e-38).log().sum()
            p[at] -= 1
            torch.mm(p, head, out=d_hidden[part])
            add_product(d_head, p, hidden[part])
        ctx.save_for_backward(d_hidden.mul_(scale), d_head.mul_(scale).to(head.dtype))
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad, d_head * grad, None, None


class LogProbs(torch.autograd.Function):
    """``log p(label)``, fp32 ``[N]``, with each chunk recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, head, labels)
        result = torch.empty(len(labels))
        for part in chunks(len(labels)):
            logits = hidden[part] @ head.t()
            own = logits.gather(1, labels[part, None])[:, 0].float()
            result[part] = own - torch.logsumexp(logits.float(), -1)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, head, labels = ctx.saved_tensors
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        for part in chunks(len(labels)):
            p = torch.softmax(hidden[part] @ head.t(), -1)
            p[torch.arange(len(p)), labels[part]] -= 1
            p *= -grad[part, None].to(p.dtype)
            torch.mm(p, head, out=d_hidden[part])
            add_product(d_head, p, hidden[part])
        return d_hidden, d_head.to(head.dtype), None


def chunks(count: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


def add_product(total: Tensor, p: Tensor, hidden: Tensor) -> None:
    """Add ``p.T @ hidden`` to ``total``, which is fp32 for any dtype of the factors."""
    if p.dtype == torch.float32:
        total.addmm_(p.t(), hidden)
    else:
        total += p.t() @ hidden
