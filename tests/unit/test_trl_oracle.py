"""Five steps of DPO on eight pairs: the losses of TRL's DPOTrainer, and of a plain loop over our parts."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from components.data.tokenizer import PATH
from components.engines.attention import ATTENTION, attention_kwargs
from components.engines.logps import token_stats
from components.losses import DPO
from components.optimizers import AdamW, torch_optimizer
from runner.protocols import IGNORE, Batch

STEPS, LR, BETA = 5, 1e-3, 0.1
OPTIMIZER = AdamW(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
ROWS = [
    {
        "prompt": f"What does `{name}` do?",
        "chosen": f" It {verb} what it is given" + ", one by one" * (index % 3) + ".",
        "rejected": " Nobody knows" + ", not even the author" * (index % 4) + ".",
    }
    for index, (name, verb) in enumerate(
        zip(
            ("zip", "sorted", "open", "print", "sum", "filter", "repr", "hash"),
            ("pairs", "orders", "reads", "shows", "adds", "drops", "spells", "numbers"),
            strict=True,
        )
    )
]

Pair = tuple[list[int], list[int], list[int]]
"""Token ids of prompt, chosen and rejected."""


def tiny_model() -> nn.Module:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=8192,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def trl_losses(folder: Path) -> tuple[list[float], list[Pair]]:
    """Loss of every step, before its update, and the tokens TRL made of ``ROWS``."""
    trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[test]')")
    datasets = pytest.importorskip("datasets")
    losses: list[float] = []

    class Recording(trl.DPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    model = tiny_model()
    config = trl.DPOConfig(
        output_dir=str(folder),
        beta=BETA,
        loss_type=["sigmoid"],
        max_length=None,
        max_steps=STEPS,
        per_device_train_batch_size=len(ROWS),
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta1=OPTIMIZER.betas[0],
        adam_beta2=OPTIMIZER.betas[1],
        adam_epsilon=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        max_grad_norm=OPTIMIZER.max_grad_norm,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Recording(
        model=model,
        ref_model=copy.deepcopy(model),
        args=config,
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(PATH),
    )
    trainer.train()
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    return losses, [tuple(row[key] for key in keys) for row in trainer.train_dataset]


def packed(pairs: Sequence[Pair]) -> Batch:
    """Chosen then rejected, end to end in one row; labels are shifted and cover the answers."""
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows], dtype=torch.int32)
    labels = [[IGNORE] * (len(prompt) - 1) + answer + [IGNORE] for prompt, answer in rows]
    return Batch(
        input_ids=torch.tensor([[t for prompt, answer in rows for t in prompt + answer]]),
        labels=torch.tensor([[t for row in labels for t in row]]),
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths])[None],
        seqlens=lengths,
        cu_seqlens=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(lengths.max()),
        pair_index=torch.arange(len(rows)),
    )


class Scores:
    """The one method of an engine that ``DPO.prepare`` calls."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor]:
        assert reference
        return [stats(self.reference, batch).logps for batch in microbatches]


def stats(model: Any, batch: Batch) -> Any:
    hidden = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **attention_kwargs(batch)
    ).last_hidden_state
    return token_stats(hidden, model.lm_head.weight, batch.labels)


def our_losses(pairs: Sequence[Pair], micro_batch_size: int) -> list[float]:
    model, loss = tiny_model(), DPO(BETA, 0.0)
    model.set_attn_implementation(ATTENTION)
    optimizer = torch_optimizer(OPTIMIZER, model.named_parameters())
    batches = [packed(pairs[i : i + micro_batch_size]) for i in range(0, len(pairs), micro_batch_size)]
    prepared = loss.prepare(batches, Scores(copy.deepcopy(model)))  # type: ignore[arg-type]
    count = sum(loss.counts(batch)["loss"] for batch in prepared)
    losses = []
    for _ in range(STEPS):
        terms = [loss(stats(model, batch), batch).terms["loss"] / count for batch in prepared]
        total = torch.stack(terms).sum()
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("micro_batch_size", [8, 3])
def test_five_steps_equal_trl(tmp_path: Path, micro_batch_size: int) -> None:
    expected, pairs = trl_losses(tmp_path)
    got = our_losses(pairs, micro_batch_size)
    assert len(expected) == STEPS
    assert expected[-1] < 0.8 * expected[0], "it learns, or equality would prove nothing"
    assert got == pytest.approx(expected, abs=1e-4)
