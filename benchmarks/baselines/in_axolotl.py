"""axolotl with sample packing, without attention between samples.

In its environment, install torch, then axolotl.
"""

import json
from typing import Any

from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS, Asked, parse
from benchmarks.baselines.hf_events import StepEvents


class EventsPlugin(BasePlugin):
    """An axolotl plugin that adds the callback ``StepEvents`` to the trainer."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:  # noqa: ARG002
        return [StepEvents(trainer.processing_class.pad_token_id)]


def configuration(asked: Asked) -> dict[str, Any]:
    """Return the content of axolotl's YAML file."""
    return {
        "base_model": str(asked.model),
        "plugins": ["benchmarks.baselines.in_axolotl.EventsPlugin"],
        "datasets": [{"path": str(asked.data / "sft_messages.json"), "type": "chat_template"}],
        "dataset_prepared_path": str(asked.data.parent / "axolotl"),
        "chat_template": "tokenizer_default",
        "sequence_len": MAX_LENGTH,
        "sample_packing": True,
        "attn_implementation": "sdpa",
        "micro_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "max_steps": asked.steps,
        "optimizer": "adamw_torch_fused",
        "learning_rate": asked.lr,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler": "constant",
        "bf16": asked.dtype == "bf16",
        "fp16": False,
        "tf32": False,
        "output_dir": str(asked.output),
        "save_strategy": "no",
        "val_set_size": 0.0,
        "logging_steps": asked.steps,
        "use_wandb": False,
    }


def main() -> None:
    asked = parse()
    config = asked.output / "axolotl.yaml"
    config.write_text(json.dumps(configuration(asked)))  # JSON is YAML
    do_train(load_cfg(str(config)), TrainerCliArgs())


if __name__ == "__main__":
    main()
