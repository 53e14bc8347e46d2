"""TRL: SFTTrainer with packing without attention between sequences (``bfd``), and DPOTrainer."""

from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS, Asked, parse
from benchmarks.baselines.hf_events import StepEvents
from benchmarks.baselines.hf_options import training_options


def main() -> None:
    asked = parse()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32")
    events = StepEvents(tokenizer.pad_token_id)
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [events]}
    (dpo if asked.stage == "dpo" else sft)(asked, common).train()


def sft(asked: Asked, common: dict[str, Any]) -> SFTTrainer:
    """Return a trainer with one row per forward pass.

    TRL joins the rows of a forward pass into one sequence with one mask, whose cost grows with the square of
    their number.
    """
    args = SFTConfig(
        **training_options(asked),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS,
        max_length=MAX_LENGTH,
        packing=True,
        packing_strategy="bfd",
    )
    rows = load_dataset("json", data_files=str(asked.data / "sft_prompt_completion.json"), split="train")
    return SFTTrainer(args=args, train_dataset=rows, **common)


def dpo(asked: Asked, common: dict[str, Any]) -> DPOTrainer:
    args = DPOConfig(
        **training_options(asked), per_device_train_batch_size=ROWS, max_length=MAX_LENGTH, beta=0.1
    )
    rows = load_dataset("json", data_files=str(asked.data / "dpo_trl.json"), split="train")
    return DPOTrainer(args=args, train_dataset=rows, **common)


if __name__ == "__main__":
    main()
