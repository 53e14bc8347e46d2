"""Chats tokenised per CPU second, here and by TRL: ``python -m benchmarks.tokenizing [--chats 20000]``.

Both read the same JSON lines of prompt and completion turns into token ids and labels of the completion, in
one process, with the tokenizer of the package: this program through ``data=files``, from the file to the plan
of the first epoch, and TRL through ``datasets.map`` as its SFTTrainer calls it. The two numbers of tokens
must agree. Times are CPU time of the process and its children.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from benchmarks.throughput import RESULTS, report
from components.data import FilesData
from components.data.tokenizer import PATH

SENTENCE = "the model reads a long file of many short words and then says what it has found in it"


def write_chats(path: Path, count: int) -> None:
    """Write chats of one question (about 20 words) and one answer (about 80)."""
    rng = random.Random(0)

    def turn(role: str, length: int) -> list[dict[str, str]]:
        words = rng.choices(SENTENCE.split(), k=rng.randrange(length // 2, length * 3 // 2))
        return [{"role": role, "content": f"{' '.join(words)} {rng.randrange(10**6)}."}]

    chats = ({"prompt": turn("user", 20), "completion": turn("assistant", 80)} for _ in range(count))
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def here(path: Path, scratch: Path) -> int:
    """Tokenise and pack with this program, and return the number of tokens."""
    data = FilesData(train=str(path), cache_dir=str(scratch / "cache"), num_workers=1, max_length=4096)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    prepared = data.prepare("chat", tokenizer, seed=0, global_batch_size=8, max_steps=1, epochs=None)
    return prepared.audit.train.sources[0].tokens


def in_trl(path: Path, scratch: Path) -> int:
    """Tokenise with TRL's SFTTrainer, whose model is tiny, and return the number of tokens."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = scratch / "model"
    LlamaForCausalLM(LlamaConfig(vocab_size=8192, **size)).save_pretrained(folder)
    options = {"output_dir": str(scratch / "trl"), "report_to": "none", "use_cpu": True, "max_length": 4096}
    rows = datasets.load_dataset("json", data_files=str(path), cache_dir=str(scratch / "hf"), split="train")
    trainer = SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=SFTConfig(**options),
        processing_class=AutoTokenizer.from_pretrained(PATH),
        train_dataset=rows,
    )
    return sum(map(len, trainer.train_dataset.with_format("arrow")["input_ids"].to_pylist()))


def measure(tokenize: Callable[[Path, Path], int], path: Path, scratch: Path) -> tuple[int, float]:
    """Return the number of tokens and the CPU time in seconds of ``tokenize``."""
    scratch.mkdir()
    began = cpu_seconds()
    return tokenize(path, scratch), cpu_seconds() - began


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizing", description=__doc__)
    parser.add_argument("--chats", type=int, default=20_000)
    asked = parser.parse_args(arguments)
    found: dict[str, object] = {"chats": asked.chats}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as name:
        scratch = Path(name)
        few, all_of_them = scratch / "few.jsonl", scratch / "chats.jsonl"
        write_chats(few, 16)
        write_chats(all_of_them, asked.chats)
        for program, tokenize in {"here": here, "trl": in_trl}.items():
            _, start_up = measure(tokenize, few, scratch / f"{program}-few")
            tokens[program], spent = measure(tokenize, all_of_them, scratch / program)
            found[f"{program}_chats_per_cpu_second"] = round(asked.chats / (spent - start_up))
            print(
                f"{program}: {tokens[program]:,} tokens, {found[f'{program}_chats_per_cpu_second']} chats/s"
            )
    about = report("benchmarks.tokenizing", arguments, "one process on the CPU", [], {})
    facts = {key: about[key] for key in ("command", "date", "device", "versions")}
    (RESULTS / "tokenizing.json").write_text(json.dumps(facts | found | {"tokens": tokens}, indent=2) + "\n")


if __name__ == "__main__":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    main(sys.argv[1:])
