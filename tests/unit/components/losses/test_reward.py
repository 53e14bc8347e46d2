"""The loss of a reward model by hand, and the positions that it scores by transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.data import FilesData
from components.data.tokenizer import PATH
from components.losses import Reward
from tests.oracle import packed, tiny_model

PAD = 0
SEQUENCES = ([5, 6, 7, 8], [5, 6], [9, PAD, 8, PAD, PAD], [5, 6, PAD])
"""Two end with the padding token, as those of a tokenizer that pads with its end token."""


def in_one_row() -> Batch:
    return replace(packed([([s[0]], s[1:]) for s in SEQUENCES]), pad_id=PAD)


def padded() -> Batch:
    width = max(map(len, SEQUENCES))
    ids = torch.tensor([s + [PAD] * (width - len(s)) for s in SEQUENCES])
    return Batch(
        input_ids=ids,
        labels=torch.full_like(ids, IGNORE),
        position_ids=torch.arange(width).expand_as(ids),
        seqlens=torch.tensor([len(s) for s in SEQUENCES], dtype=torch.int32),
        pair_index=torch.arange(len(SEQUENCES)),
        pad_id=PAD,
    )


def test_the_scored_positions_are_those_of_transformers() -> None:
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, PAD
    model = AutoModelForSequenceClassification.from_config(config).eval()
    batch = padded()
    with torch.no_grad():
        expected = model(batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)).logits[:, 0]
        values = model.score(model.base_model(batch.input_ids).last_hidden_state)[..., 0]
    places = batch.scored_positions()
    torch.testing.assert_close(values.reshape(-1)[places], expected, rtol=0, atol=0)
    starts = in_one_row().cu_seqlens
    assert starts is not None
    within = places - torch.arange(len(SEQUENCES)) * batch.labels.shape[1]
    assert (in_one_row().scored_positions() - starts[:-1]).tolist() == within.tolist() == [3, 1, 2, 1]


def test_an_empty_micro_batch_has_no_pair() -> None:
    batch = replace(in_one_row(), margins=torch.ones(4)).select(torch.zeros(4, dtype=torch.bool))
    values = torch.ones(1, 1, requires_grad=True)
    output = Reward()(TokenStats(torch.zeros(1, 1), values=values), batch)
    output.terms["loss"].backward()
    assert Reward().counts(batch) == {"loss": 0}
    assert (output.terms["loss"].item(), values.grad) == (0, torch.zeros(1, 1))


@pytest.mark.parametrize("batch", [in_one_row(), padded()], ids=["packed", "padded"])
def test_the_loss_by_hand(batch: Batch) -> None:
    margins = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    values = torch.randn(batch.labels.shape, generator=torch.Generator().manual_seed(0))
    stats = TokenStats(torch.zeros_like(values), values=values)
    output = Reward(center_rewards_coefficient=0.1)(stats, replace(batch, margins=margins))
    a, b, c, d = values.reshape(-1)[batch.scored_positions()].double()
    loss = -F.logsigmoid(a - b - 0.5) - F.logsigmoid(c - d) + 0.1 * ((a + b) ** 2 + (c + d) ** 2)
    assert output.terms["loss"].item() == pytest.approx(loss.item(), rel=1e-12)
    means = {name: float(total) / count for name, (total, count) in output.metrics.items()}
    assert means == pytest.approx(
        {
            "accuracy": (int(a > b) + int(c > d)) / 2,
            "margin": ((a - b + c - d) / 2).item(),
            "mean_reward": ((a + b + c + d) / 4).item(),
            "rewards/chosen": ((a + c) / 2).item(),
            "rewards/rejected": ((b + d) / 2).item(),
        }
    )
    without = Reward()(stats, batch).terms["loss"].item()
    assert without == pytest.approx((-F.logsigmoid(a - b) - F.logsigmoid(c - d)).item(), rel=1e-12)


# ---- margins


def microbatches(
    folder: Path, records: list[dict[str, Any]], kind: Any = "ranked", **options: Any
) -> list[Batch]:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    data = FilesData(train=str(path), cache_dir=str(folder / "cache"), shuffle=False, **options)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    prepared = data.prepare(kind, tokenizer, seed=0, global_batch_size=4, max_steps=1, epochs=None)
    return prepared.train_loader(BatchShard(4, 2)).microbatches(0)


def pair(name: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"What is a {name}?", "chosen": " An animal.", "rejected": " A stone.", **fields}


def test_margins_travel_with_their_pairs(tmp_path: Path) -> None:
    records = [pair("cat", margin=1), pair("dog"), pair("bee", margin=-0.25)]
    first, last = microbatches(tmp_path, records, packing="none")
    assert first.margins is not None
    assert last.margins is not None
    assert first.margins.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert last.margins.tolist()[:2] == [-0.25, -0.25]
    [batch] = microbatches(tmp_path, records, packing="bfd")
    assert batch.margins is not None
    assert batch.margins.tolist() == [1.0, 1.0, 0.0, 0.0, -0.25, -0.25]
    [batch] = microbatches(tmp_path, records, packing="bfd", ignore_fields=["margin"])
    assert batch.margins is not None
    assert batch.margins.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("kind", "margin", "message"),
    [
        ("ranked", "one", "field 'margin' is 'one'. Write a number"),
        ("ranked", True, "field 'margin' is True"),
        ("preference", 0.5, "only stage=rm reads the margin of a pair"),
    ],
)
def test_margins_that_are_refused(tmp_path: Path, kind: str, margin: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        microbatches(tmp_path, [pair("cat", margin=margin)], kind)
