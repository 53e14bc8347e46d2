"""Tokenise samples in chunks, and leave out those that cannot be trained on."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

import numpy as np
from transformers import PreTrainedTokenizerBase

from components.contracts.data import PAIRS, SampleKind
from components.data.records.columns import NOT_MESSAGES, renamed
from components.data.records.formats import normalize
from components.data.records.messages import REASONING_KEYS, has_reasoning_part
from components.data.records.options import RecordError, RecordOptions
from components.data.records.record_files import PairAnswer, Record, Unreadable
from components.data.records.samples import (
    PreferenceSample,
    Sample,
    Turns,
    UnpairedSample,
    is_empty,
    unusual_turns,
)
from components.data.records.split_pairs import split_pairs
from components.data.store.token_store import BadRecord, LeftOut, TokenChunk
from components.data.tokenize.chat import Encoded, encode_sample
from components.data.tokenize.truncation import LongSamples, fit

Content = Record | PairAnswer | Sample
"""The content of one sample: a record, one answer of a preference record, or a finished sample."""


@dataclass(frozen=True)
class KLPair:
    """A record of unpaired data with the completion of another record as its mismatched answer."""

    record: Content
    kl_completion: Turns


EncoderInput = tuple[Content | KLPair | Unreadable, str]


def encoder_inputs(
    items: Iterator[tuple[Record | Sample | Unreadable, str]],
    kind: SampleKind,
    options: RecordOptions,
    *,
    split: bool,
) -> Iterator[EncoderInput]:
    """Return the inputs of an ``Encoder`` for the items of a source.

    Items of ``unpaired`` data get a mismatched answer for the KL term of KTO; with ``split``, each pair is
    first split into two items. Items of other kinds are returned unchanged.
    """
    if kind != "unpaired":
        return items
    return with_kl_completions(split_pairs(items) if split else items, options)


def with_kl_completions(
    items: Iterable[tuple[Content | Unreadable, str]], options: RecordOptions
) -> Iterator[EncoderInput]:
    """Pair each record with the next completion that is not empty, for the KL term of KTO.

    After the last record, the search continues with the first. The pairs do not depend on the layout. Records
    that cannot be read are in no pair and keep their places.
    """
    held: list[EncoderInput] = []
    first: Turns | None = None
    for item, origin in items:
        try:
            completion = None if isinstance(item, Unreadable) else _completion(item, options, origin)
        except RecordError as error:
            item, completion = Unreadable(error), None
        if completion is not None and is_nonempty(completion):
            yield from _paired(held, completion)
            held, first = [], completion if first is None else first
        held.append((item, origin))
    yield from _paired(held, first)


def _completion(item: Content, options: RecordOptions, origin: str) -> Turns:
    sample = normalize(item, options, origin)[0] if isinstance(item, dict | PairAnswer) else item
    assert isinstance(sample, UnpairedSample)
    return sample.completion


def is_nonempty(completion: Turns) -> bool:
    """Return whether a completion has text or tool calls."""
    if isinstance(completion, str):
        return bool(completion.strip())
    return not all(map(is_empty, completion))


def _paired(held: Iterable[EncoderInput], completion: Turns | None) -> Iterator[EncoderInput]:
    for item, origin in held:
        if isinstance(item, Unreadable):
            yield item, origin
        else:
            assert not isinstance(item, KLPair)
            yield item if completion is None else KLPair(item, completion), origin


@dataclass(frozen=True)
class EncodeResult:
    """The result of encoding one sample."""

    sequences: list[Encoded]
    left_out: LeftOut | None
    truncated: bool
    long_prompt: bool
    cut_prompt: bool
    desirable: bool
    margin: float
    unread: Sequence[str]
    unusual: Sequence[str]


@dataclass(frozen=True)
class Encoder:
    """A function from batches of items to chunks of tokens, for this process or a worker."""

    tokenizer: PreTrainedTokenizerBase
    kind: SampleKind
    max_length: int | None
    """Maximum number of tokens of a sequence. None means any length."""
    long_samples: LongSamples
    train_on_prompt: bool
    options: RecordOptions = field(default_factory=RecordOptions)
    """Options by which records become samples. They do not apply to items that are samples already."""

    def __call__(self, items: Sequence[EncoderInput]) -> TokenChunk:
        """Return the chunk of tokens of ``items``.

        Raises:
            ConfigError: if an item cannot be encoded. With ``data.on_bad_record=skip``, bad records are left
                out instead.
        """
        results = [self._result(item, origin) for item, origin in items]
        encoded = [result for result in results if not isinstance(result, BadRecord)]
        kept = [
            (n, one) for n, one in enumerate(results) if isinstance(one, EncodeResult) and not one.left_out
        ]
        sequences = [one for _, result in kept for one in result.sequences]
        unpaired = self.kind == "unpaired"
        trained = [result.sequences[:1] if unpaired else result.sequences for _, result in kept]
        return TokenChunk(
            tokens=np.fromiter(chain.from_iterable(one.input_ids for one in sequences), np.uint32),
            mask=np.fromiter(chain.from_iterable(one.mask for one in sequences), np.bool_),
            lengths=np.array([len(one.input_ids) for one in sequences], np.int64),
            truncated=np.array([result.truncated for _, result in kept], np.bool_),
            stop_trained=np.array([all(one.stop_trained for one in each) for each in trained], np.bool_),
            left_out=Counter(result.left_out for result in encoded if result.left_out),
            long_prompts=sum(result.long_prompt for result in encoded),
            cut_prompts=sum(result.cut_prompt for result in encoded),
            desirable=np.array([result.desirable for _, result in kept], np.bool_) if unpaired else None,
            margins=np.array([result.margin for _, result in kept]) if self.kind == "ranked" else None,
            records=np.array([n for n, _ in kept], np.int64),
            bad=[result for result in results if isinstance(result, BadRecord)],
            unread=Counter(chain.from_iterable(result.unread for result in encoded)),
            unusual=Counter(chain.from_iterable(result.unusual for result in encoded)),
        )

    def _result(self, item: Content | KLPair | Unreadable, origin: str) -> EncodeResult | BadRecord:
        try:
            return self._encode(item, origin)
        except RecordError as error:
            if self.options.on_bad_record == "stop":
                raise
            return BadRecord(origin, str(error).removeprefix(f"{origin}: "))

    def _encode(self, item: Content | KLPair | Unreadable, origin: str) -> EncodeResult:
        if isinstance(item, Unreadable):
            raise item.error
        sample, unread = self._sample(item, origin)
        encoded = self._sequences(sample, origin)
        fitted = self._fit(encoded)
        limit = inf if self.max_length is None else self.max_length
        return EncodeResult(
            fitted or encoded,
            left_out=self._left_out(fitted),
            truncated=fitted is not None and fitted[0] is not encoded[0],
            long_prompt=encoded[0].prompt_length > limit,
            cut_prompt=fitted is not None and 2 * fitted[0].prompt_length < encoded[0].prompt_length,
            desirable=isinstance(sample, UnpairedSample) and sample.desirable,
            margin=sample.margin if isinstance(sample, PreferenceSample) else 0.0,
            unread=unread,
            unusual=unusual_turns(sample),
        )

    def _sequences(self, sample: Sample, origin: str) -> list[Encoded]:
        """Return the sequences of a sample.

        The mismatched answer is another sample's. If the chat template refuses it after this prompt, the
        sample's own answer takes its place, because nothing is wrong with the sample itself.
        """
        try:
            return encode_sample(sample, self.tokenizer, train_on_prompt=self.train_on_prompt, origin=origin)
        except RecordError:
            if not isinstance(sample, UnpairedSample) or sample.kl_completion == sample.completion:
                raise
            return self._sequences(replace(sample, kl_completion=sample.completion), origin)

    def _sample(self, item: Content | KLPair, origin: str) -> tuple[Sample, Sequence[str]]:
        if isinstance(item, KLPair):
            sample, unread = self._sample(item.record, origin)
            assert isinstance(sample, UnpairedSample)
            if isinstance(sample.prompt, str) != isinstance(item.kl_completion, str):
                raise RecordError(
                    f"{origin}: has strings where the next record has messages, or the reverse.\n"
                    "Set data.strings=chat, or give all records the same form."
                )
            return replace(sample, kl_completion=item.kl_completion), unread
        if not isinstance(item, dict | PairAnswer):
            return item, ()
        sample, unread = normalize(item, self.options, origin)
        record = item.record if isinstance(item, PairAnswer) else item
        left_out = {*unread, *NOT_MESSAGES, "segments"}
        fields = renamed(record, self.options).items()
        read = {name: value for name, value in fields if name not in left_out}
        return sample, [*unread, *self._unread_by_template(read)]

    def _unread_by_template(self, record: Mapping[str, object]) -> Iterator[str]:
        """Yield the reasoning of messages that the chat template of the tokenizer does not read.

        ``record`` has the fields with messages, or with strings. The reasoning is named ``FIELD[].KEY``, or
        ``FIELD[].content[].reasoning`` if it is a part of a content.
        """
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            turns = [turn for turn in values if isinstance(turn, dict)]
            for key in REASONING_KEYS:
                if any(turn.get(key) for turn in turns) and not self._template_reads(key):
                    yield f"{name}[].{key}"
            if "reasoning" in self.options.ignore_fields:  # then ``normalize`` lists it
                continue
            if any(map(has_reasoning_part, turns)) and not self._template_reads("reasoning_content"):
                yield f"{name}[].content[].reasoning"

    def _template_reads(self, key: str) -> bool:
        return re.search(rf"\b{key}\b", str(self.tokenizer.chat_template)) is not None

    def _fit(self, encoded: list[Encoded]) -> list[Encoded] | None:
        if self.kind != "unpaired":
            last_turn = self.options.mask_history
            return fit(encoded, self.max_length, self.long_samples, end_of_prompt=last_turn)
        # The mismatched answer is another sample's; its length must not cut or drop this one.
        answer = fit(encoded[:1], self.max_length, self.long_samples, end_of_prompt=True)
        mismatched = fit(encoded[1:], self.max_length, "truncate", end_of_prompt=True)
        assert mismatched is not None, "a long sample is cut, never dropped"
        return None if answer is None else answer + mismatched

    def _left_out(self, fitted: list[Encoded] | None) -> LeftOut | None:
        if fitted is None:
            return "dropped"
        if not all(any(one.mask[1:]) for one in fitted):
            return "unsupervised"
        if self.kind in PAIRS and fitted[0].input_ids == fitted[1].input_ids:
            return "identical"
        return None

    def vocab_size(self) -> int:
        """Return the largest token id plus 1; ``len(tokenizer)`` is less if ids have gaps."""
        return max(self.tokenizer.get_vocab().values()) + 1
