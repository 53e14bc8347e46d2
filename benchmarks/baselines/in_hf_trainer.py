"""Hugging Face's Trainer on blocks of text, grouped as in the pre-training example of transformers."""

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS, Asked, parse
from benchmarks.baselines.hf_events import StepEvents
from benchmarks.baselines.hf_options import training_options


def main() -> None:
    asked = parse()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32")
    args = TrainingArguments(**training_options(asked), per_device_train_batch_size=ROWS)
    Trainer(
        model=model,
        args=args,
        train_dataset=blocks(asked, tokenizer),
        data_collator=default_data_collator,
        callbacks=[StepEvents(tokenizer.pad_token_id)],
    ).train()


def blocks(asked: Asked, tokenizer: AutoTokenizer) -> Dataset:
    """Return the concatenated documents in pieces of ``MAX_LENGTH`` tokens, which ``datasets`` caches."""

    def group(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        joined = [
            token for ids in tokenizer(rows["text"])["input_ids"] for token in [*ids, tokenizer.eos_token_id]
        ]
        starts = range(0, len(joined) - MAX_LENGTH + 1, MAX_LENGTH)
        cut = [joined[start : start + MAX_LENGTH] for start in starts]
        return {"input_ids": cut, "labels": cut}

    documents = load_dataset("json", data_files=str(asked.data / "pt.json"), split="train")
    return documents.map(group, batched=True, batch_size=None, remove_columns=documents.column_names)


if __name__ == "__main__":
    main()
