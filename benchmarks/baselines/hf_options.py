"""Options of transformers.TrainingArguments and all its subclasses."""

from typing import Any

from benchmarks.baselines.arguments import Asked


def training_options(asked: Asked) -> dict[str, Any]:
    """Return the options of a run with fused AdamW and clipping, without saving or logging."""
    return {
        "output_dir": str(asked.output),
        "max_steps": asked.steps,
        "learning_rate": asked.lr,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": asked.dtype == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
