"""LLaMA-Factory: sft packed without attention between samples (``neat_packing``), pre-training, and dpo.

In its environment, install torch, then llamafactory. Then uninstall torchvision and replace torchaudio by an
empty module, since it is imported but not used here. Neither of them works with this version of torch.
"""

from typing import Any

from llamafactory.train.tuner import run_exp
from transformers import AutoTokenizer

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS, Asked, parse
from benchmarks.baselines.hf_events import StepEvents
from benchmarks.baselines.hf_options import training_options

STAGES: dict[str, dict[str, Any]] = {
    "sft": {"packing": True, "neat_packing": True},
    "pt": {"packing": True},
    "dpo": {"pref_beta": 0.1, "pref_loss": "sigmoid"},
}


def options(asked: Asked) -> dict[str, Any]:
    """Return the options of LLaMA-Factory, with the keys of its YAML files."""
    return {
        **training_options(asked),
        **STAGES[asked.stage],
        "model_name_or_path": str(asked.model),
        "stage": asked.stage,
        "do_train": True,
        "finetuning_type": "full",
        "template": "chatml",
        "dataset_dir": str(asked.data),
        "dataset": f"bench_{asked.stage}",
        "cutoff_len": MAX_LENGTH,
        "per_device_train_batch_size": ROWS,
        "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True,
    }


def main() -> None:
    asked = parse()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    run_exp(options(asked), callbacks=[StepEvents(tokenizer.pad_token_id)])


if __name__ == "__main__":
    main()
