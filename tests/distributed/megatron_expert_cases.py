"""Rank functions for MoE models on the Megatron engine, and the same with plain transformers."""

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE
from components.engines.megatron import Megatron
from components.models.experts import unstack_experts
from components.models.moe_loss_config import AUX, MoELossConfig, Z
from tests.distributed.cases import Step, next_token, plain_model, sequences, share
from tests.distributed.expert_cases import Trained, Work, make, one_step, run


def plain_step(family: str, terms: MoELossConfig) -> tuple[Step, dict[str, float]]:
    """Return a step by transformers with load balancing by sequence, and the means of the router losses."""
    model: Any = plain_model(family)
    logits: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    rows, added = sequences(), {AUX: torch.zeros(()), Z: torch.zeros(())}
    labels, tokens = (sum(int((r.labels != IGNORE).sum()) for r in rows), sum(len(r.ids) for r in rows))
    nll = torch.zeros(())
    for row in rows:
        logits.clear()
        out = model(input_ids=row.ids[None], use_cache=False).logits[0]
        nll = nll + F.cross_entropy(out, row.labels, ignore_index=IGNORE, reduction="sum") / labels
        for layer in logits:
            added[AUX] = added[AUX] + balance(layer, model.config) / len(rows)
            added[Z] = added[Z] + layer.logsumexp(-1).square().sum() / tokens
    means = {name: added[name] * strength for name, strength in terms.coefficients.items()}
    loss = torch.stack([nll, *means.values()]).sum()
    loss.backward()
    given = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    grads = {name: grad.clone() for name, grad in unstack_experts(given)}
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    reported = {name: value.item() for name, value in means.items()} | {"lm_loss": nll.item()}
    return Step(loss.item(), norm, grads), reported


def balance(logits: Tensor, config: Any) -> Tensor:
    """Return the load balancing loss of one layer and one sequence.

    It is 1 for an even load. That of transformers is K.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    top_k = config.num_experts_per_tok
    return load_balancing_loss_func((logits,), logits.shape[1], top_k) / top_k


def unmarked(on: Megatron, work: Work) -> Trained:
    """Call ``run`` without our marks on the parameters of experts, only with those of Megatron."""
    with mock.patch("components.engines.megatron.runtime.model.expert_parameters", return_value=[]):
        return run(on, work)


def without_terms(on: Megatron, work: Work) -> tuple[float, float, float]:
    """Return the loss of an evaluation, the negative mean of logps, and the main loss of the next step."""
    engine, loss = make(work, on), next_token()
    batches = share(engine, work.layout, work.micro_batch)
    evaluated = engine.evaluate([batches], loss)["loss"]
    logps = engine.logps(batches)
    sums = [float(sum(each.sum() for each in logps)), sum(loss.counts(b)["loss"] for b in batches)]
    total, count = engine.sum_over_data(sums)
    result = one_step(engine, work, 0)
    engine.close()
    return evaluated, -total / count, result.metrics["lm_loss"]


def aborted(on: Megatron, work: Work) -> list[float]:
    """Return the losses of two steps, with a step in between that is aborted halfway."""
    engine, loss = make(work, on), next_token()
    first = one_step(engine, work, 0)
    batches = share(engine, work.layout, work.micro_batch)
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches[:1], loss)
    engine.abort_train_step()
    second = one_step(engine, work, 1)
    engine.close()
    return [first.loss, second.loss]


def routed(on: Megatron, family: str, padding: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route 24 tokens, the last ``padding`` of them padding, with our first router and with Megatron's.

    Return weights and choices of ours, then those of Megatron, or by position those of the first ``room``
    tokens of every expert.
    """
    from megatron.core.transformer.moe.moe_utils import (
        apply_router_token_dropping,
        topk_routing_with_score_function,
    )

    from components.engines.megatron.runtime.moe_router import TokenRouting, find_routers
    from components.engines.shared.moe_losses import RoutedTokens

    engine = make(Work(family), on)
    router = find_routers(engine.chunks)[0]
    hidden = torch.randn(24, 1, 32, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(24, dtype=torch.int64)
    ids[24 - padding :] = -1
    router.token_routing = TokenRouting(RoutedTokens(ids, torch.tensor([24 - padding])), None)
    weights, taken = router(hidden)
    top_k = router.experts.top_k
    logits = router.gating(hidden.flatten(0, 1))
    theirs, chosen = topk_routing_with_score_function(logits, top_k, use_pre_softmax=False)
    theirs, chosen = theirs * (ids >= 0)[:, None], chosen & (ids >= 0)[:, None]
    if on.moe_token_drop_policy == "position":
        first = chosen & (chosen.cumsum(0) <= room)
        expected = theirs * first, first
    else:
        factor, pads = on.capacity_factor or 0.0, on.moe_pad_to_capacity
        expected = apply_router_token_dropping(theirs, chosen, top_k, factor, "probs", pads)
    engine.close()
    return weights.detach(), taken, *(tensor.detach() for tensor in expected)
