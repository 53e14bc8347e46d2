"""Rank functions of test_fsdp2_layouts.py: a step of DPO on pairs that share their prompt."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard
from components.data.global_batch import Collation
from components.data.loader import TokenDataLoader
from components.data.store.token_store import TokenStore
from components.engines.fsdp2 import FSDP2
from components.engines.shared import microbatch_merging
from components.losses import DPO
from tests.distributed.cases import Step, make_engine, plain_model, step
from tests.distributed.gradients import capture
from tests.listed_plans import ListedPlans
from tests.pairs import plan_pairs

BETA = 0.3
AGREEMENT = 0.9
"""Factor of the reference log-probabilities. Without it, both models would be equal at step 0."""

Logps = dict[tuple[int, ...], Tensor]
"""Log-probabilities of the labels of each sequence, by these labels."""


def dpo_step(on: FSDP2, path: Path, bound: int) -> tuple[Step, Logps]:
    """Return one step on all pairs of the store in ``path``, and this rank's reference log-probabilities.

    ``bound`` is the largest number of tokens of a merged micro-batch of the reference pass.
    """
    microbatch_merging.MAX_TOKENS["cpu"] = bound
    engine, loss = make_engine(on=on, reference="frozen"), DPO(beta=BETA, label_smoothing=0.0)
    store = TokenStore.open(path)
    loader = TokenDataLoader(
        store,
        ListedPlans([plan_pairs(store, shared=True, max_length=20)]),
        BatchShard(4, 1, engine.dp_rank, engine.dp_size),
        Collation(True, 0),
        drop_last=False,
        num_steps=1,
    )
    batches = loss.prepare(loader.microbatches(0), engine)
    logps = {labels: found for batch in batches for labels, found in by_sequence(batch)}
    agreeing = [replace(batch, ref_logps=AGREEMENT * reference(batch)) for batch in batches]
    grads = capture(engine)
    result = step(engine, agreeing, loss)
    engine.close()
    return Step(result.loss, result.grad_norm, grads), logps


def reference(batch: Batch) -> Tensor:
    assert batch.ref_logps is not None
    return batch.ref_logps


def by_sequence(batch: Batch) -> list[tuple[tuple[int, ...], Tensor]]:
    spans = batch.cu_seqlens.diff().tolist() if batch.cu_seqlens is not None else []
    rows = zip(batch.labels[0].split(spans), reference(batch)[0].split(spans), strict=True)
    return [
        (tuple(labels[labels != IGNORE].tolist()), logps[labels != IGNORE])
        for labels, logps in rows
        if (labels != IGNORE).any()
    ]


def plain_dpo_step(store: TokenStore) -> tuple[Step, Logps]:
    """Return the same step by transformers, one sequence at a time, with our tokens and initial weights."""
    model, found, ratios = plain_model("qwen3"), {}, []
    for sequence, length in enumerate(store.lengths.tolist()):
        ids = torch.from_numpy(store.tokens(sequence, 0, length).astype("int64"))
        answer = int(store.mask(sequence, 0, length).argmax())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, answer - 1 : -1]
        logps = -F.cross_entropy(logits, ids[answer:], reduction="none")
        found[tuple(ids[answer:].tolist())] = logps.detach()
        ratios.append((logps - AGREEMENT * logps.detach()).sum())
    chosen, rejected = torch.stack(ratios).view(-1, 2).unbind(1)
    loss = -F.logsigmoid(BETA * (chosen - rejected)).mean()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return Step(loss.item(), torch.stack([g.norm() for g in grads.values()]).norm().item(), grads), found
