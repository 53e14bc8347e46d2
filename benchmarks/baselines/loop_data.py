"""Samples and steps of the hand-written loop, tokenised by ``tokenizers`` and packed end to end."""

import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from benchmarks.baselines.arguments import MAX_LENGTH, ROWS
from benchmarks.baselines.loop_model import Span

IGNORE = -100
Ids = list[int]
Order = list[list[Ids]]
"""For each step the tokens of its sequences; for pairs, all chosen sides, then all rejected sides."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its answers, which have labels.

    A document is an answer without a prompt, and a pair has two answers, chosen and rejected.
    """

    prompt: Ids
    answers: tuple[Ids, ...]
    silent: int = 0
    """Number of tokens at the end of an answer without labels: the line break after the stop token."""

    @property
    def first(self) -> Ids:
        return self.prompt + self.answers[0]


@dataclass
class Step:
    """Input of one forward pass. Labels are already shifted."""

    ids: Ids = field(default_factory=list)
    labels: Ids = field(default_factory=list)
    positions: Ids = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    tokens: int = 0
    """Number of tokens in all sequences. A shared prompt counts once for each of its answers."""

    def add(self, sample: Sample, *, share_prompt: bool) -> None:
        """Add one sequence per answer.

        With ``share_prompt``, only the last token of the prompt is computed again for the second answer.
        """
        begin, seen = len(self.ids), len(sample.prompt) - 1
        for number, answer in enumerate(sample.answers):
            if share_prompt and number:
                self._append([sample.prompt[-1]], answer, sample.silent, seen, (begin, begin + seen))
                self.tokens += seen
            else:
                self._append(sample.prompt, answer, sample.silent)

    def _append(
        self, prompt: Ids, answer: Ids, silent: int, position: int = 0, prefix: tuple[int, int] | None = None
    ) -> None:
        count = len(prompt) + len(answer)
        self.spans.append(Span(len(self.ids), len(self.ids) + count, prefix))
        self.ids += prompt + answer
        spoken = [IGNORE] * len(prompt) + answer[: len(answer) - silent]
        self.labels += [*spoken[1:], *[IGNORE] * (silent + 1)]
        self.positions += range(position, position + count)
        self.tokens += count


class Reader:
    """A reader of a folder made by ``benchmarks.baselines.samples``, which returns steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "model_small" / "tokenizer.json"))

    def steps(self, stage: str, *, share_prompt: bool = False, order: Order | None = None) -> list[Step]:
        """Return all steps.

        If ``order`` is given, it determines the samples of each step. Otherwise they are packed (only in sft)
        and shuffled.
        """
        samples = list({"pt": self._rows, "sft": self._chats, "dpo": self._pairs}[stage]())
        if order is not None:
            indices = ordered(samples, order)
        else:
            rows = pack([len(sample.first) for sample in samples]) if stage == "sft" else singly(samples)
            Random(0).shuffle(rows)
            indices = [list(chain(*rows[i : i + ROWS])) for i in range(0, len(rows), ROWS)]
        return [step([samples[i] for i in group], share_prompt) for group in indices]

    def _rows(self) -> Iterator[Sample]:
        """Yield the concatenated documents in pieces of ``MAX_LENGTH`` tokens."""
        end = self.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        joined = [token for row in self._read("pt") for token in [*self._encode(row["text"]), end]]
        for start in range(0, len(joined) - MAX_LENGTH + 1, MAX_LENGTH):
            yield Sample([], (joined[start : start + MAX_LENGTH],))

    def _chats(self) -> Iterator[Sample]:
        for row in self._read("sft_messages"):
            *before, last = row["messages"]
            prompt = self._prompt(before)
            yield Sample(prompt, (self._answer(last),), silent=1)

    def _pairs(self) -> Iterator[Sample]:
        for row in self._read("dpo_trl"):
            sides = (self._answer(*row["chosen"]), self._answer(*row["rejected"]))
            yield Sample(self._prompt(row["prompt"]), sides, silent=1)

    def _prompt(self, messages: Sequence[dict[str, str]]) -> Ids:
        turns = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)
        return self._encode("".join(turns) + "<|im_start|>assistant\n")

    def _answer(self, message: dict[str, str]) -> Ids:
        return self._encode(message["content"] + "<|im_end|>\n")

    def _encode(self, text: str) -> Ids:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _read(self, name: str) -> list[dict[str, Any]]:
        return json.loads((self.folder / f"{name}.json").read_text())


def step(samples: Sequence[Sample], share_prompt: bool) -> Step:
    result = Step()
    for sample in samples:
        result.add(sample, share_prompt=share_prompt)
    return result


def ordered(samples: Sequence[Sample], order: Order) -> list[list[int]]:
    index = {tuple(sample.first): i for i, sample in enumerate(samples)}
    sides = len(samples[0].answers)
    return [[index[tuple(ids)] for ids in group[: len(group) // sides]] for group in order]


def singly(samples: Sequence[Sample]) -> list[list[int]]:
    return [[i] for i in range(len(samples))]


def pack(lengths: Sequence[int]) -> list[list[int]]:
    """Pack by best-fit decreasing; return the sample indices of each row.

    A row has at most ``MAX_LENGTH`` tokens.
    """
    assert max(lengths) <= MAX_LENGTH
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free tokens and row, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = bisect_left(free, (lengths[i], -1))
        space, row = free.pop(fit) if fit < len(free) else (MAX_LENGTH, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(free, (space - lengths[i], row))
    return rows
