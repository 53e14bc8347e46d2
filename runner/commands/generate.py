"""``python -m runner.generate checkpoint=DIR prompts=FILE [output=FILE]``: completions of prompts.

checkpoint=DIR     a run or checkpoint folder, an export, an adapter folder or any Hugging Face folder
prompts=FILE       records with `messages` or `prompt`, or a txt file with a prompt per line
output=FILE        jsonl: each record with its `completion`; default: standard output
answer=FIELD       the field of each record with the right answer; counts exact matches, without outer blanks
strings=plain      or chat: whether a prompt that is a string is text as it is, or the turn of a user
max_new_tokens=256 batch_size=8
temperature=0      0 takes the most probable token each time; above 0 also top_p=1 top_k=0 seed=0
trust=[MODULE]     further modules whose classes the run's config.yaml may name
trust_remote_code=true  run the code that the model brings with it
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from components.contracts.errors import ConfigError
from runner.cli import run_or_answer
from runner.commands import sampling
from runner.commands.arguments import Keys, first_line, parse_pairs, whole_number
from runner.commands.sampling import Sampling

if TYPE_CHECKING:
    from components.data.tokenize.prompts import Prompt

KEYS: Keys = {
    "checkpoint": None,
    "prompts": None,
    "output": None,
    "answer": None,
    "strings": ("plain", "chat"),
    "batch_size": None,
    **sampling.KEYS,
}


def generate(arguments: Sequence[str]) -> None:
    """Write the completion of each prompt."""
    given = parse_pairs(arguments, KEYS)
    for key in ("checkpoint", "prompts"):
        if key not in given:
            raise ConfigError(f"{key}: is missing. Usage: {first_line(__doc__)}")
    options = Sampling.read(given)
    batch_size = whole_number(given, "batch_size", 8, least=1)
    from components.data.tokenize.prompts import read_prompts
    from components.models.generate import complete
    from runner.commands.trained_model import open_model

    records = read_prompts(given["prompts"], chat=given.get("strings") == "chat")
    answers = [right_answer(prompt, given["answer"]) for prompt in records] if "answer" in given else []
    model, tokenizer = open_model(given)
    prompts = [prompt.token_ids(tokenizer) for prompt in records]
    sampling.set_seed(options.seed)
    matches = 0
    with ExitStack() as files:  # opened last: an error before leaves an older file as it is
        try:
            output = files.enter_context(open(given["output"], "w")) if "output" in given else sys.stdout
        except OSError as error:
            raise ConfigError(f"output: cannot be written ({error.strerror}); name another file.") from error
        for start in range(0, len(prompts), batch_size):
            found = complete(model, tokenizer, prompts[start : start + batch_size], **options.options())
            for number, completion in enumerate(found, start):
                row = {**records[number].record, **completion}
                if answers:
                    row["exact_match"] = completion["completion"].strip() == answers[number]
                    matches += row["exact_match"]
                print(json.dumps(row, ensure_ascii=False), file=output, flush=True)
    if answers:
        share = matches / len(answers)
        print(f"exact match: {matches:,} of {len(answers):,} ({share:.1%})", file=sys.stderr)


def right_answer(prompt: "Prompt", field: str) -> str:
    value = prompt.record.get(field)
    if not isinstance(value, str):
        has = "no such field" if value is None else f"no text in it, but {value!r}"
        raise ConfigError(f"answer={field}: {prompt.origin} has {has}; name a field with text.")
    return value.strip()


def main() -> NoReturn:
    sys.exit(run_or_answer(generate, __doc__))
