"""Make the files of this folder: ``python -m components.data.tokenizer.train [FOLDER]``.

They are a byte-level BPE tokenizer, trained on the train split of the embedded data. The same version of
Python gives the same bytes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from components.contracts.data import SampleKind
from components.data.demo import stdlib_records
from components.data.records.samples import ChatSample, TextSample
from components.data.tokenizer import PATH

VOCAB_SIZE = 8192
PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"


def corpus() -> Iterator[str]:
    """Yield the sources of modules, then questions and answers."""
    kinds: tuple[SampleKind, ...] = ("text", "chat")
    for kind in kinds:
        for sample, _ in stdlib_records(kind, "train"):
            if isinstance(sample, TextSample):
                yield sample.text
            elif isinstance(sample, ChatSample):
                yield from (message["content"] for message in sample.messages)


def train_tokenizer() -> Tokenizer:
    """Train a tokenizer of 8192 tokens, including the three special ones.

    Text is split into words as by GPT-2, and every digit is a word of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Write the files that ``AutoTokenizer`` reads.

    The token that ends a turn is also the end-of-sequence token.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (Path(PATH) / "chat_template.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(folder)


if __name__ == "__main__":
    save_tokenizer(train_tokenizer(), sys.argv[1] if len(sys.argv) > 1 else PATH)
