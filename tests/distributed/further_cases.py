"""Rank functions for multi-token prediction (MTP), and the same computed with transformers' modules."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from components.checkpoint.dcp import save_tensors
from components.contracts.batch import IGNORE
from components.contracts.engine import EngineOptions
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.experts import unstack_experts
from components.models.moe_loss_config import MoELossConfig
from components.models.mtp import MTPConfig
from components.optimizers import AdamW
from tests.distributed.cases import (
    Step,
    make_engine,
    megatron,
    next_token,
    padded,
    sequences,
    share,
    spec,
    step,
)
from tests.distributed.gradients import capture

DEPTHS, COEF = 2, 0.3


class PlainLayer(nn.Module):
    """An MTP layer: a decoder layer of transformers and the modules of DeepSeek-V3's equations 21 to 23."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        last, hidden, norm = model.model.layers[-1], model.config.hidden_size, type(model.model.norm)
        eps = getattr(model.config, "rms_norm_eps", 1e-6)
        self.block = type(last)(model.config, model.config.num_hidden_layers - 1)
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)


def plain_step(family: str) -> Step:
    """Return a step by transformers: one sequence at a time, eager attention, MTP depths by slicing.

    Only the initial weights come from our code.
    """
    model, mtp, named = plain_model(family)
    means = plain_means_of(model, mtp)
    total = means[0] + COEF * means[1:].mean()
    total.backward()
    grads = dict(unstack_experts((name, p.grad) for name, p in named.items() if p.grad is not None))
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    return Step(total.item(), norm, grads)


@torch.no_grad()
def plain_means(family: str) -> list[float]:
    """Return the main loss and the losses of both MTP depths without coefficients."""
    model, mtp, _ = plain_model(family)
    means: list[float] = plain_means_of(model, mtp).tolist()
    return means


def plain_model(family: str) -> tuple[Any, list[PlainLayer], dict[str, nn.Parameter]]:
    """Return a model with the initial weights, its MTP layers, and its parameters by their names on disk."""
    described = replace(spec(family), mtp=MTPConfig(DEPTHS))
    model: Any = AutoModelForCausalLM.from_config(spec(family).config(), attn_implementation="eager")
    mtp = [PlainLayer(model) for _ in range(DEPTHS)]
    named = dict(model.named_parameters())
    for depth, layer in enumerate(mtp):
        prefix = f"model.layers.{len(model.model.layers) + depth}"
        named |= {f"{prefix}.{name_on_disk(own)}": p for own, p in layer.named_parameters()}
    weights = described.weights(0)
    for name, values in unstack_experts((name, p.data) for name, p in named.items()):
        values.copy_(weights(name))
    return model, mtp, named


def name_on_disk(own: str) -> str:
    return "shared_head.norm.weight" if own == "norm.weight" else own.removeprefix("block.")


def plain_means_of(model: Any, mtp: list[PlainLayer]) -> Tensor:
    sums, counts = torch.zeros(DEPTHS + 1), torch.zeros(DEPTHS + 1)
    for row in sequences():
        for depth, logits in enumerate(plain_logits(model, mtp, row.ids)):
            labels = row.labels[depth:]
            sums[depth] += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            counts[depth] += (labels != IGNORE).sum()
    return sums / counts


def plain_logits(model: Any, mtp: list[PlainLayer], ids: Tensor) -> list[Tensor]:
    """Return the logits of each depth, ``[T - depth, V]``."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state
    found = [model.lm_head(hidden)[0]]
    for depth, layer in enumerate(mtp, 1):
        length = len(ids) - depth
        embedded = model.model.embed_tokens(ids[None, depth:])
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(hidden[:, :length])], -1)
        positions = torch.arange(length)[None]
        slides = "sliding" if getattr(model.config, "sliding_window", None) else "full"
        kind = (getattr(model.config, "layer_types", None) or [f"{slides}_attention"])[-1]
        window = model.config.sliding_window if kind == "sliding_attention" else None
        per_kind = (kind,) if model.config.model_type == "gemma3_text" else ()
        hidden = layer.block(
            layer.eh_proj(joined),
            attention_mask=mask(length, window),
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(embedded, positions, *per_kind),
        )
        hidden = layer.norm(hidden)
        found.append(model.lm_head(hidden)[0])
    return found


def mask(length: int, window: int | None) -> Tensor:
    """Return an additive causal mask ``[1, 1, T, T]``."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen = (distance >= 0) & (distance < (window or length))
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


def one_step(
    on: FSDP2 | Megatron, family: str, layout: str, micro_batch: int = 4
) -> tuple[Step, dict[str, float]]:
    """Return a step of the engine and its metrics."""
    engine = make_engine(family, on=on, mtp_layers=DEPTHS)
    grads = capture(engine)
    result = step(engine, share(engine, layout, micro_batch), next_token())
    engine.close()
    return Step(result.loss, result.grad_norm, grads), dict(result.metrics)


def curve(on: FSDP2 | Megatron, family: str, number: int | None = None) -> list[float]:
    """Return the loss of each step, each followed by that of an evaluation, which has no MTP terms.

    ``number`` is that of the micro-batches of a step. None means all.
    """
    engine, losses = make_engine(family, on=on, mtp_layers=DEPTHS), []
    for seed in range(3):
        losses.append(step(engine, share(engine, "packed", 2, seed)[:number], next_token()).loss)
        losses.append(engine.evaluate([share(engine, "packed", 2)], next_token())["loss"])
    engine.close()
    return losses


def megatrons_own(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    """Return gradients of our step and of Megatron's own model on one padded sequence, then both losses."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from components.engines.megatron.runtime.model import block_spec

    engine = make_engine(family, on=megatron(), mtp_layers=DEPTHS)
    ours, batch = engine.chunks[0].module, padded(sequences()[3:4])
    config = copy(engine.config)
    config.calculate_per_token_loss, config.mtp_loss_scaling_factor = False, COEF
    layers = block_spec(config, None)
    theirs = GPTModel(
        config,
        layers,
        len(ours.head),
        max_sequence_length=64,
        share_embeddings_and_output_weights=ours.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False),
    )
    theirs.rotary_pos_emb.inv_freq = ours.rotary_pos_emb.inv_freq
    theirs.load_state_dict(ours.state_dict())
    mask = (batch.labels != IGNORE).float()
    MTPLossAutoScaler.set_loss_scale(torch.ones(()))
    losses = theirs(
        batch.input_ids, batch.position_ids, None, labels=batch.labels.clamp(min=0), loss_mask=mask
    )
    main = (losses * mask).sum() / mask.sum()
    main.backward()
    expected = {name: p.grad.clone() for name, p in theirs.named_parameters()}
    found: dict[str, Tensor] = {}
    drop = engine.zero_grad

    def look_first() -> None:
        found.update({name: p.main_grad.clone() for name, p in ours.named_parameters()})
        drop()

    engine.zero_grad = look_first
    result = step(engine, [batch], next_token())
    engine.close()
    depths = sum(result.metrics[f"mtp_{depth + 1}_loss"] for depth in range(DEPTHS))
    return found, expected, result.loss - COEF * depths / DEPTHS, main.item()


def saved(on: FSDP2 | Megatron, family: str, path: Path) -> list[float]:
    """Train two steps, save a checkpoint, and return the losses of two more steps."""
    engine = make_engine(family, on=on, mtp_layers=DEPTHS)
    for seed in (0, 1):
        step(engine, share(engine, "packed", 2, seed), next_token())
    save_tensors(path, engine.tensors())
    return finish(engine)


def resumed(on: FSDP2 | Megatron, family: str, path: Path, again: Path) -> list[float]:
    """Load the checkpoint at ``path``, save it to ``again``, and return the losses of two steps."""
    engine = make_engine(family, on=on, mtp_layers=DEPTHS)
    engine.load(path)
    save_tensors(again, engine.tensors())
    return finish(engine)


def finish(engine: Any) -> list[float]:
    losses = [step(engine, share(engine, "packed", 2, seed), next_token()).loss for seed in (2, 3)]
    engine.close()
    return losses


def exported(on: FSDP2 | Megatron, family: str, path: Path) -> None:
    engine = make_engine(family, on=on, mtp_layers=DEPTHS)
    engine.export(path)
    engine.close()


def routed(on: FSDP2 | Megatron) -> dict[str, float]:
    """Return the losses of two steps with all router losses, and the norm and metrics of the second."""
    terms = MoELossConfig("sequence", 0.1, z_loss_coef=0.01, bias_update_rate=0.1)
    described: Any = replace(spec("deepseek"), mtp=MTPConfig(DEPTHS), moe=terms)
    engine: Any = on.build(described, AdamW(lr=1e-3), EngineOptions(torch.float32, "cpu"))
    first, second = (step(engine, share(engine, "packed", 2, seed), next_token()) for seed in (0, 1))
    engine.close()
    return {"first": first.loss, "second": second.loss, "norm": second.grad_norm, **second.metrics}
