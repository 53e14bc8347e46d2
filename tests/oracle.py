"""Training steps of a preference loss with our code and with a trainer of TRL, on the same tiny model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from components.contracts.batch import IGNORE, Batch
from components.contracts.loss import Loss, TokenStats
from components.engines.shared.token_log_probs import token_stats
from components.engines.shared.varlen_attention import ATTENTION, attention_kwargs, sequence_spans
from components.optimizers import AdamW, torch_optimizer

OPTIMIZER = AdamW(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
OPTIONS = {
    "max_length": None,
    "learning_rate": OPTIMIZER.lr,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "adam_beta1": OPTIMIZER.betas[0],
    "adam_beta2": OPTIMIZER.betas[1],
    "adam_epsilon": OPTIMIZER.eps,
    "weight_decay": OPTIMIZER.weight_decay,
    "max_grad_norm": OPTIMIZER.max_grad_norm,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Options of every trainer of TRL."""

Answer = tuple[list[int], list[int]]
"""Token ids of the prompt and of the answer."""
Row = dict[str, float]
"""Loss and metrics of one step, before its update."""


def tiny_model() -> Any:
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


def other_model() -> Any:
    """Return a reference that differs from the initial policy, so that log-ratios are not zero."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def packed(answers: Sequence[Answer]) -> Batch:
    """Pack the sequences into one row; labels are shifted and cover the answers."""
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in answers], dtype=torch.int32)
    labels = [[IGNORE] * (len(prompt) - 1) + answer + [IGNORE] for prompt, answer in answers]
    return Batch(
        input_ids=torch.tensor([[t for prompt, answer in answers for t in prompt + answer]]),
        labels=torch.tensor([[t for row in labels for t in row]]),
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths])[None],
        seqlens=lengths,
        cu_seqlens=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(lengths.max()),
        pair_index=torch.arange(len(answers)),
    )


class Models:
    """The methods of an engine that ``prepare`` calls, on one rank."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        self.policy, self.reference = policy, reference

    @torch.no_grad()
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor]:
        model = self.reference if reference else self.policy
        return [stats(model, batch).logps for batch in microbatches]

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        return list(values)


def stats(model: Any, batch: Batch, requires: frozenset[str] = frozenset()) -> TokenStats:
    hidden = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **attention_kwargs(batch, sequence_spans(batch)),
    ).last_hidden_state
    return token_stats(hidden, model.lm_head.weight, batch.labels, requires=requires)


def our_steps(loss: Loss, microbatches: Sequence[Batch], num_steps: int) -> list[Row]:
    model, reference = tiny_model(), other_model()
    model.set_attn_implementation(ATTENTION)
    reference.set_attn_implementation(ATTENTION)
    optimizer = torch_optimizer(OPTIMIZER, model.named_parameters())
    rows = []
    for _ in range(num_steps):
        prepared = loss.prepare(microbatches, Models(model, reference))  # type: ignore[arg-type]
        outputs = [loss(stats(model, batch, loss.requires), batch) for batch in prepared]
        counts = [loss.counts(batch) for batch in prepared]
        total = sum(
            sum(output.terms[name] for output in outputs) / sum(count[name] for count in counts)
            for name in counts[0]
        )
        assert isinstance(total, Tensor)
        update(optimizer, model, total)
        sums = {name: [output.metrics[name] for output in outputs] for name in outputs[0].metrics}
        means = {name: sum(float(v) for v, _ in of) / sum(n for _, n in of) for name, of in sums.items()}
        rows.append({"loss": total.item(), **means})
    return rows


def their_steps(
    model: nn.Module, step: Callable[[], tuple[Tensor, Mapping[str, float]]], num_steps: int
) -> list[Row]:
    """Train ``model`` from the weights of ``tiny_model``; ``step`` computes a trainer's loss and metrics."""
    model.load_state_dict(copy.deepcopy(tiny_model().state_dict()))
    model.train()
    optimizer = torch_optimizer(OPTIMIZER, model.named_parameters())
    rows = []
    for _ in range(num_steps):
        loss, metrics = step()
        update(optimizer, model, loss)
        rows.append({"loss": loss.item(), **metrics})
    return rows


def update(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    assert OPTIMIZER.max_grad_norm is not None
    torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    optimizer.step()
