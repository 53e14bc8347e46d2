"""Rank functions of test_preference_layouts.py: every preference loss on one engine."""

from dataclasses import replace
from typing import Any

import torch

from components.contracts.batch import Batch
from components.contracts.engine import Engine
from components.contracts.loss import Loss
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.losses import CPO, DPO, KTO, ORPO
from components.losses.preference_formulas import PAIR_LOSSES
from components.optimizers import SGD
from tests.distributed.cases import LAYOUTS, Step, make_engine, next_token, sequences, share, step
from tests.distributed.gradients import capture

SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
KTO_OPTIONS: dict[str, Any] = {"beta": 0.1, "desirable_weight": 0.7, "undesirable_weight": 1.2}
LOSSES: dict[str, Loss] = {
    **{kind: DPO(beta=0.1, label_smoothing=SMOOTHED.get(kind, 0.0), loss=kind) for kind in PAIR_LOSSES},  # type: ignore[arg-type]
    "rpo, ld": DPO(beta=0.1, label_smoothing=0.2, rpo_alpha=0.6, ld_alpha=0.3),
    "mpo": DPO(beta=0.1, loss=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 0.5)),
    "wpo": DPO(beta=0.1, wpo=True),
    "js": DPO(beta=0.1, f_divergence="js_divergence"),
    "no reference": DPO(beta=0.1, reference="none"),
    "cpo": CPO(beta=0.1, loss="sigmoid", cpo_alpha=1.0),
    "simpo": CPO(beta=2.0, loss="simpo", cpo_alpha=0.0),
    "orpo": ORPO(beta=0.3),
    "kto": KTO(loss="kto", **KTO_OPTIONS),
    "apo_zero_unpaired": KTO(loss="apo_zero_unpaired", **KTO_OPTIONS),
}
FEW = ("ipo", "rpo, ld", "wpo", "orpo", "kto")
"""One loss of each type: per token, with likelihood term and weights, with another statistic, reference-free,
with constants."""

Found = dict[str, tuple[Step, dict[str, float], dict[str, float]]]
"""For each loss a step with its gradients, the metrics of the step, and those of an evaluation."""


def pairs(engine: Engine, layout: str, micro_batch: int, loss: Loss) -> list[Batch]:
    """Return this rank's micro-batches of four pairs, or of four answers and their mismatched answers."""
    rows, found = sequences(), []
    for start in range(0, len(rows), micro_batch):
        batch = LAYOUTS[layout](rows[start : start + micro_batch])
        if loss.kind == "preference":
            found.append(replace(batch, pair_index=torch.arange(micro_batch)))
        else:
            labels = [(start // 2 + i) % 3 % 2 for i in range(micro_batch // 2)]
            marked = torch.tensor([value for label in labels for value in (label, 2)])
            found.append(replace(batch, sequence_labels=marked))
    return found[engine.dp_rank :: engine.dp_size]


def every_loss(on: FSDP2 | Megatron, layout: str, micro_batch: int, names: tuple[str, ...]) -> Found:
    """Return a step and an evaluation of each loss, from weights that differ from the reference.

    They differ by one step of SGD, which does not amplify small errors as Adam does.
    """
    engine = make_engine(on=on, reference="frozen", optimizer=SGD(lr=1.0, max_grad_norm=None))
    step(engine, share(engine, "packed", 2), next_token(), lr=0.1)
    found: Found = {}
    grads = capture(engine)
    for name in names:
        loss = LOSSES[name]
        batches = pairs(engine, layout, micro_batch, loss)
        result = step(engine, loss.prepare(batches, engine), loss, lr=0.0)
        means = engine.evaluate([batches], loss)
        found[name] = Step(result.loss, result.grad_norm, dict(grads)), dict(result.metrics), means
    engine.close()
    return found
