"""``python -m runner.generate checkpoint=DIR prompts=FILE [output=FILE]``: completions of prompts.

checkpoint=DIR     a run or checkpoint folder, an export, an adapter folder or any Hugging Face folder
prompts=FILE       records with `messages`, `prompt` or `instruction`, or a txt file with a prompt per line
output=FILE        jsonl: each record with its `completion` (if the record already has such a field, that is
                   renamed `record_completion`); default: standard output
answer=FIELD       the field of each record with the right answer, with which the completion is compared
metric=exact_match equality, apart from white space at both ends; or rouge1, rouge2, rougeL: the F-measure, by
                   the package rouge-score
system=TEXT        a system turn for conversations without one; default: data.default_system of the run
chat_template_kwargs={NAME: VALUE}  variables of the chat template; default: those of the run
strings=plain      or chat: whether a prompt that is a string is text as it is, or the turn of a user
max_new_tokens=256 batch_size=8
temperature=0      0 takes the most probable token each time; above 0 also top_p=1 top_k=0 seed=0
trust=[MODULE]     further modules whose classes the run's config.yaml may name
trust_remote_code=true  run the code that the model brings with it
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import eq
from typing import TYPE_CHECKING, Literal, NoReturn, TextIO

from components.contracts.errors import ConfigError, TrainingError
from components.contracts.json_types import Json
from runner.cli import announce_loading, run_or_answer
from runner.commands import sampling
from runner.commands.arguments import Keys, parse_pairs, whole_number
from runner.distribution import pip_install
from runner.records.failures import DISK_ERRORS

if TYPE_CHECKING:
    from components.data.tokenize.prompts import Prompt

KEYS: Keys = {
    **dict.fromkeys(("checkpoint", "prompts", "output", "answer", "batch_size")),
    "metric": ("exact_match", "rouge1", "rouge2", "rougeL"),
    "strings": ("plain", "chat"),
    **sampling.KEYS,
}


def write_completions(arguments: Sequence[str]) -> None:
    """Write the completion of each prompt.

    Raises:
        ConfigError: if an argument is wrong, the prompts or the model cannot be read, or the output cannot be
            opened.
        TrainingError: if the output cannot be written.
    """
    given = parse_pairs(arguments, KEYS, "checkpoint", "prompts", usage=__doc__)
    metric = given.get("metric", "exact_match")
    if "metric" in given and "answer" not in given:
        raise ConfigError("metric: compares completions with answers; give answer=FIELD, or leave it out.")
    score = scorer(metric)
    options, seed = sampling.read_sampling(given)
    announce_loading()
    import torch

    from components.data.progress import show_progress
    from components.data.tokenize.prompts import read_prompts
    from components.models.generate import BATCH_SIZE, complete_all
    from runner.commands.trained_model import open_model, record_options

    batch_size = whole_number(given, "batch_size", BATCH_SIZE, least=1)
    strings: Literal["plain", "chat"] = "chat" if given.get("strings") == "chat" else "plain"
    records = read_prompts(given["prompts"], replace(record_options(given), strings=strings))
    check_conversations(given, records)
    answers = [right_answer(prompt, given["answer"]) for prompt in records] if "answer" in given else []
    model, tokenizer = open_model(given)
    prompts = [prompt.token_ids(tokenizer) for prompt in records]
    torch.manual_seed(seed)
    scores: list[float] = []
    shows = "output" in given  # a bar would be between the rows on a terminal
    # The output is opened last: an error before leaves an older file as it is.
    with opened(given.get("output")) as output, ExitStack() as bar:
        advance = bar.enter_context(show_progress("generating", "rows")) if shows else lambda _: None
        found = complete_all(model, tokenizer, prompts, batch_size=batch_size, **options)
        for number, completion in enumerate(found):
            advance(1)
            added: Json = {**completion}
            if answers:
                added[metric] = score(answers[number], completion["completion"].strip())
                scores.append(added[metric])
            row = records[number].completed(added)
            print(json.dumps(row, ensure_ascii=False, default=str), file=output, flush=True)
    if "output" in given:
        print(f"{len(prompts):,} completions written to {given['output']}", file=sys.stderr)
    if answers:
        print(f"{metric}: {sum(scores) / len(scores):.1%} of {len(scores):,} answers", file=sys.stderr)


@contextmanager
def opened(path: str | None) -> Iterator[TextIO]:
    """Yield the file at ``path`` for writing. None means standard output.

    Raises:
        ConfigError: if the file cannot be opened.
        TrainingError: if the file cannot be written, because the disk is full, for example.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w")  # noqa: SIM115  it is closed below
    except OSError as error:
        raise ConfigError(f"output: cannot be written ({error.strerror}); name another file.") from error
    try:
        with file:
            yield file
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise TrainingError(
            f"output={path}: could not be written ({error.strerror}); free some space, or name another file."
        ) from error


def scorer(metric: str) -> Callable[[str, str], float]:
    """Return the function that maps the right answer and a completion to a score from 0 to 1.

    Raises:
        ConfigError: if ``metric`` needs the package rouge-score, which is not installed.
    """
    if metric == "exact_match":
        return eq
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ConfigError(
            f"metric={metric}: rouge-score is not installed; run {pip_install('rouge')}."
        ) from error
    rouge = RougeScorer([metric])
    return lambda answer, completion: float(rouge.score(answer, completion)[metric].fmeasure)


def check_conversations(given: Mapping[str, str], prompts: Sequence["Prompt"]) -> None:
    """Raise ConfigError for an argument that only conversations read if all prompts are plain strings."""
    for key in ("system", "chat_template_kwargs"):
        if key in given and all(isinstance(prompt.turns, str) for prompt in prompts):
            raise ConfigError(
                f"{key}: is not read, because every prompt is a string; use strings=chat, or leave it out."
            )


def right_answer(prompt: "Prompt", field: str) -> str:
    value = prompt.record.get(field)
    if not isinstance(value, str):
        has = "no such field" if value is None else f"no text in it, but {value!r}"
        raise ConfigError(f"answer={field}: {prompt.origin} has {has}; name a field with text.")
    return value.strip()


def main() -> NoReturn:
    sys.exit(run_or_answer(write_completions, __doc__))
