"""litgpt's pre-training command on a model of the same shape with its own random weights.

In its environment, install torch, then litgpt, and requests, which it needs to save at the end.
"""

import json
from typing import Any

import torch
from lightning.fabric.loggers.logger import Logger
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS, Asked, parse
from benchmarks.baselines.events import Events

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}
"""Precision options. Mixed means fp32 weights and moments, as in all other programs here."""


class EventLogger(Logger):
    """A logger that writes an event for each iteration of litgpt, which is one step here."""

    name, version = "events", 0

    def __init__(self) -> None:
        self.events = Events()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # noqa: ARG002
        if "loss" in metrics:
            self.events.step(tokens=ROWS * MAX_LENGTH, labels=ROWS * MAX_LENGTH, loss=float(metrics["loss"]))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore the hyperparameters."""


class Blocks(DataModule):
    """Concatenated documents in rows of ``MAX_LENGTH`` + 1 tokens, the last of which is only a label."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
        end = tokenizer.token_to_id("<|im_end|>")
        rows = json.loads((asked.data / "pt.json").read_text())
        joined = [i for row in rows for i in [*tokenizer.encode(row["text"]).ids, end]]
        starts = range(0, len(joined) - MAX_LENGTH, MAX_LENGTH)
        self.rows = [torch.tensor(joined[start : start + MAX_LENGTH + 1]) for start in starts]

    def connect(self, *_: Any, **__: Any) -> None:
        """Ignore the sizes, which are fixed."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=ROWS, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return one row, because litgpt evaluates once before it trains."""
        return DataLoader(self.rows[:1], batch_size=1)


def shape(asked: Asked) -> Config:
    config = json.loads((asked.model / "config.json").read_text())
    return Config(
        name="bench",
        block_size=MAX_LENGTH,
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        n_layer=config["num_hidden_layers"],
        n_embd=config["hidden_size"],
        n_head=config["num_attention_heads"],
        n_query_groups=config["num_key_value_heads"],
        head_size=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        norm_class_name="RMSNorm",
        norm_eps=config["rms_norm_eps"],
        norm_qk=True,
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        rope_base=1_000_000,
        parallel_residual=False,
        bias=False,
    )


def main() -> None:
    asked = parse()
    torch._dynamo.config.disable = not asked.compile  # litgpt always compiles
    pretrain.choose_logger = lambda *_, **__: EventLogger()
    pretrain.save_hyperparameters = lambda *_, **__: None  # it would parse our command line
    pretrain.setup(
        "bench",
        model_config=shape(asked),
        out_dir=asked.output,
        precision=PRECISIONS[asked.dtype],
        data=Blocks(asked),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=ROWS,
            micro_batch_size=ROWS,
            max_tokens=asked.steps * ROWS * MAX_LENGTH,
            max_norm=1.0,
            min_lr=asked.lr,
            lr_warmup_steps=0,
            tie_embeddings=True,
        ),
        eval=EvalArgs(interval=10**6, max_iters=1),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": asked.lr, "weight_decay": 0.0}},
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main()
