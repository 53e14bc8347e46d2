"""Common rank functions of tests, and the same computation with plain transformers and torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.adapters import LoRA
from components.contracts.batch import IGNORE, Batch
from components.contracts.engine import Engine, EngineOptions, LossScaling, Reference, StepResult
from components.contracts.loss import Loss
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.losses import NextToken
from components.models import ModelSpec
from components.models.experts import unstack_experts
from components.models.moe_loss_config import MoELossConfig
from components.models.mtp import MTPConfig
from components.models.pretrained import persistent_buffers
from components.optimizers import AdamW, Optimizer
from tests.distributed.gradients import capture

LENGTHS = (5, 17, 9, 30, 12, 3, 24, 8)
VOCABULARY = 160
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 99,  # no experts
    "rms_norm_eps": 1e-3,  # the norms of the latents use 1e-6 nevertheless
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    # An odd vocabulary size, and a padding token, whose embedding has no gradient.
    "uneven": {"model_type": "qwen3", "vocab_size": VOCABULARY + 1, "pad_token_id": 5, "head_dim": 8},
    "odd": {"model_type": "qwen3", "vocab_size": VOCABULARY + 1, "head_dim": 8, "tie_word_embeddings": True},
    # Only the first layer has a sliding window, and its rotary frequencies differ.
    "gemma": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 8},
    # Four layers, for two stages of two chunks.
    "qwen2_four": {"model_type": "qwen2", "tie_word_embeddings": True, "num_hidden_layers": 4},
    "llama_four": {"model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    # A dense first layer, a shared expert, and groups of two experts.
    "deepseek": LATENT
    | {
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    # A dense first layer, and weights of experts that do not sum to 1.
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe_four": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "dropping": {"model_type": "qwen3", "head_dim": 8, "attention_dropout": 0.5},
    # Multi-head latent attention with 12 columns per head in queries and keys, and 10 in values.
    "latent": LATENT,
    "latent_whole": LATENT | {"q_lora_rank": None},
    "latent_yarn": LATENT
    | {
        "rope_interleave": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 0.5,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Many tokens have probabilities near the smallest numbers of fp16.
    "wide": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "vocab_size": 20_000,
        "initializer_range": 0.9,
    },
    "deep": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8, "num_hidden_layers": 5},
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Larger than usual, so that attention and its gradients are far from uniform.
    "initializer_range": 0.2,
}


def spec(family: str) -> ModelSpec:
    return ModelSpec(architecture=COMMON | SHAPES[family])


@dataclass(frozen=True)
class Sequence_:
    """Token ids and shifted labels of one sequence."""

    ids: Tensor
    labels: Tensor


def sequences(seed: int = 0) -> list[Sequence_]:
    """Return eight sequences of different lengths, each with labels on a suffix of different length."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, VOCABULARY, (length + 1,), generator=g)
        labels = ids[1:].clone()
        labels[: int(torch.randint(0, length - 1, (1,), generator=g))] = IGNORE
        made.append(Sequence_(ids[:-1], labels))
    return made


def packed(rows: Sequence[Sequence_]) -> Batch:
    lengths = torch.tensor([len(row.ids) for row in rows], dtype=torch.int32)
    return Batch(
        input_ids=torch.cat([row.ids for row in rows])[None],
        labels=torch.cat([row.labels for row in rows])[None],
        position_ids=torch.cat([torch.arange(len(row.ids)) for row in rows])[None],
        seqlens=lengths,
        sequence_keys=sequence_keys(rows),
        cu_seqlens=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(lengths.max()),
    )


def padded(rows: Sequence[Sequence_]) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row.ids for row in rows], batch_first=True)
    return Batch(
        input_ids=ids,
        labels=pad([row.labels for row in rows], batch_first=True, padding_value=IGNORE),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        seqlens=torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        sequence_keys=sequence_keys(rows),
    )


def sequence_keys(rows: Sequence[Sequence_]) -> Tensor:
    """Return a key of each sequence that does not depend on the batch."""
    return torch.stack([row.ids.sum() for row in rows])


LAYOUTS = {"packed": packed, "padded": padded}


@dataclass(frozen=True)
class Step:
    loss: float
    grad_norm: float
    grads: dict[str, Tensor]


def fsdp2(dp: int = 1, **others: Any) -> FSDP2:
    return FSDP2(dp=dp, default_dp=1, reshard_after_forward=True, **others)


def megatron(**sizes: Any) -> Megatron:
    """Return the ``parallelism`` of conf/parallelism/megatron.yaml with other sizes."""
    return Megatron(**(megatron_defaults() | sizes))


@cache
def megatron_defaults() -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load("conf/parallelism/megatron.yaml"))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items() if key != "_target_"}


def make_engine(
    family: str = "qwen3",
    *,
    on: FSDP2 | Megatron | None = None,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype = torch.float32,
    max_grad_norm: float | None = None,
    reference: Reference = "none",
    count_zeros: bool = False,
    compiled: bool = False,
    float8: bool = False,
    adapter: LoRA | None = None,
    freeze: tuple[str, ...] = (),
    train_only: tuple[str, ...] = (),
    mtp_layers: int = 0,
    loss_scaling: LossScaling | None = None,
    moe: MoELossConfig = MoELossConfig(),  # noqa: B008  frozen
    **others: Any,
) -> Any:
    """Build the engine of this rank, by default FSDP2 on one rank; ``others`` are further options of it."""
    return (on or fsdp2()).build(
        replace(spec(family), freeze=freeze, train_only=train_only, moe=moe, mtp=MTPConfig(mtp_layers)),
        optimizer or AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=max_grad_norm),
        EngineOptions(
            dtype=dtype,
            device="cpu",
            reference=reference,
            count_zeros=count_zeros,
            compiled=compiled,
            adapter=adapter,
            loss_scaling=loss_scaling,
            float8=float8,
            **others,
        ),
    )


def share(engine: Engine, layout: str, micro_batch: int, seed: int = 0) -> list[Batch]:
    """Return this rank's micro-batches of a global batch of eight sequences."""
    rows = sequences(seed)
    groups = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
    return [LAYOUTS[layout](group) for group in groups[engine.dp_rank :: engine.dp_size]]


def step(
    engine: Engine, batches: Sequence[Batch], loss: Loss, lr: float = 1e-3, max_loss: float = math.inf
) -> StepResult:
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches, loss, last=True)
    return engine.finish_train_step(lr, max_loss=max_loss)


def engine_step(family: str, layout: str, micro_batch: int, loss: Loss, on: FSDP2) -> Step:
    """Return one step of the engine on eight sequences, with the gradients that it updates with."""
    engine = make_engine(family, on=on)
    grads = capture(engine)
    result = step(engine, share(engine, layout, micro_batch), loss)
    engine.close()
    return Step(result.loss, result.grad_norm, grads)


def plain_step(
    family: str, normalize: str, watch: Callable[[torch.nn.Module], Callable[[], Tensor]] | None = None
) -> Step:
    """Return the same step by transformers: one sequence at a time, eager attention, our initial weights.

    ``watch`` is called with the model. It returns a function that is called after each sequence and returns
    the term to add to the loss.
    """
    model, added = plain_model(family), torch.zeros(())
    more = None if watch is None else watch(model)
    rows = sequences()
    total = torch.zeros(())
    for row in rows:
        logits = model(input_ids=row.ids[None], use_cache=False).logits[0]
        nll = F.cross_entropy(logits, row.labels, ignore_index=IGNORE, reduction="sum")
        total = total + (nll if normalize == "token" else nll / (row.labels != IGNORE).sum())
        if more is not None:
            added = added + more()
    count = len(rows) if normalize == "sequence" else sum(int((row.labels != IGNORE).sum()) for row in rows)
    (total / count + added).backward()
    stacked = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    grads = {name: grad.clone() for name, grad in unstack_experts(stacked)}
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    return Step(total.item() / count + added.item(), norm, grads)


def plain_model(family: str, attention: str = "eager") -> torch.nn.Module:
    description = spec(family)
    model = AutoModelForCausalLM.from_config(description.config(), attn_implementation=attention)
    weights = description.weights(0)
    with torch.no_grad():
        for name, parameter in unstack_experts([*model.named_parameters(), *persistent_buffers(model)]):
            parameter.copy_(weights(name))
    return model


def assert_same(step: Step, reference: Step, relative: float = 1e-5) -> None:
    assert abs(step.loss - reference.loss) <= relative * abs(reference.loss)
    assert abs(step.grad_norm - reference.grad_norm) <= relative * reference.grad_norm
    assert step.grads.keys() == reference.grads.keys()
    for name, expected in reference.grads.items():
        error = (step.grads[name] - expected).norm() / expected.norm()
        assert error <= relative, f"{name}: relative error {error:.1e}"


def next_token(normalize: str = "token") -> NextToken:
    return NextToken(kind="chat", normalize=normalize, label_smoothing=0.0, z_loss=0.0)  # type: ignore[arg-type]
