"""The same samples in the format of each program, and the model that is trained on them.

They are in a folder with ``model_small`` (a Qwen3 of 16.6M random parameters and its tokenizer) and JSON
files: chats as messages, as prompt and completion, and as alpaca; preference pairs as messages and as
sharegpt; documents.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.baselines.arguments import MAX_LENGTH

CHATS = 512
VOCABULARY = 16384
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
LLAMA_FACTORY = {
    "bench_sft": {
        "file_name": "sft_alpaca.json",
        "columns": {"prompt": "instruction", "query": "input", "response": "output"},
    },
    "bench_dpo": {
        "file_name": "dpo_sharegpt.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "bench_pt": {"file_name": "pt.json", "columns": {"prompt": "text"}},
}
"""Content of dataset_info.json for LLaMA-Factory."""


@dataclass(frozen=True)
class Source:
    """Content of LLaMA-Factory's demo files."""

    alpaca: list[dict[str, str]]
    pairs: list[dict[str, Any]]
    documents: list[str]
    wiki: list[str]
    """Texts that are used only to train the tokenizer."""

    @classmethod
    def read(cls, folder: Path) -> "Source":
        lines = (folder / "c4_demo.jsonl").read_text().splitlines()
        return cls(
            json.loads((folder / "alpaca_en_demo.json").read_text()),
            json.loads((folder / "dpo_en_demo.json").read_text()),
            [json.loads(line)["text"] for line in lines],
            (folder / "wiki_demo.txt").read_text().split("\n"),
        )

    def texts(self) -> Iterator[str]:
        for row in self.alpaca:
            yield "\n".join(row[key] for key in ("instruction", "input", "output"))
        for pair in self.pairs:
            for turn in (*pair["conversations"], pair["chosen"], pair["rejected"]):
                yield turn["value"]
        yield from self.documents
        yield from (text[:20000] for text in self.wiki)


def make_samples(source: Path, folder: Path) -> None:
    """Write the model and all samples to ``folder``, unless it is complete; they are the same every time."""
    done = folder / "dataset_info.json"
    if done.is_file():
        return
    read = Source.read(source)
    tokenizer = make_tokenizer(read)
    make_model(tokenizer, folder / "model_small")
    alpaca = list(read.alpaca)
    Random(0).shuffle(alpaca)
    chats = [[turn("user", question(row)), turn("assistant", row["output"])] for row in alpaca[:CHATS]]
    pairs = [(pair, as_messages(pair)) for pair in read.pairs]
    short = [(pair, sides) for pair, sides in pairs if fits(tokenizer, sides)]
    files = {
        "sft_messages": [{"messages": chat} for chat in chats],
        "sft_prompt_completion": [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats],
        "sft_alpaca": alpaca[:CHATS],
        "dpo_trl": [sides for _, sides in short],
        "dpo_sharegpt": [pair for pair, _ in short],
        "pt": [{"text": text} for text in read.documents],
        "dataset_info": LLAMA_FACTORY,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))


def make_tokenizer(source: Source) -> Any:
    """Train a byte-level BPE tokenizer on all texts, with a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(source.texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        bos_token=None,
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        model_max_length=32768,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: Any, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPE,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_cache=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def question(row: dict[str, str]) -> str:
    return "\n".join(filter(None, (row["instruction"], row["input"])))


def as_messages(pair: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return a sharegpt pair as prompt, chosen and rejected messages."""
    sides = {name: [turn("assistant", pair[name]["value"])] for name in ("chosen", "rejected")}
    return {"prompt": [turn(ROLES[t["from"]], t["value"]) for t in pair["conversations"]], **sides}


def fits(tokenizer: Any, pair: dict[str, list[dict[str, str]]]) -> bool:
    """Return whether both sides have at most ``MAX_LENGTH`` tokens."""
    texts = [
        tokenizer.apply_chat_template(pair["prompt"] + pair[side], tokenize=False)
        for side in ("chosen", "rejected")
    ]
    return max(len(ids) for ids in tokenizer(texts)["input_ids"]) <= MAX_LENGTH
