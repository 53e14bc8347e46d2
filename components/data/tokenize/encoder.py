"""Tokenise samples in chunks, and leave out those that cannot be trained on."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from components.contracts.data import SampleKind
from components.data.records.formats import Format, normalize
from components.data.records.record_files import Record
from components.data.records.samples import Sample, UnpairedSample
from components.data.store.token_store import Bools, TokenChunk
from components.data.tokenize.chat import Encoded, encode_sample
from components.data.tokenize.truncation import LongSamples, fit


@dataclass(frozen=True)
class KLPair:
    """A record of unpaired data, and the one whose completion is its mismatched answer."""

    record: Record | Sample
    kl_record: Record | Sample
    kl_origin: str


EncoderInput = tuple[Record | Sample | KLPair, str]
LeftOut = Literal["dropped", "unsupervised", "identical"]


def with_kl_completions(items: Iterable[tuple[Record | Sample, str]]) -> Iterator[EncoderInput]:
    """Pair each item with the next one, and the last with the first: the same pairs in every layout."""
    both = iter(items)
    first = this = next(both)
    for other in both:
        yield KLPair(this[0], *other), this[1]
        this = other
    yield KLPair(this[0], *first), this[1]


@dataclass(frozen=True)
class EncodeResult:
    """The result of encoding one sample."""

    sequences: list[Encoded]
    left_out: LeftOut | None
    truncated: bool
    long_prompt: bool
    desirable: bool


@dataclass(frozen=True)
class Encoder:
    """Turns batches of items into chunks of tokens, in this process or in a worker."""

    tokenizer: PreTrainedTokenizerBase
    kind: SampleKind
    max_length: int | None
    """Tokens to which sequences are limited. None means any length."""
    long_samples: LongSamples
    train_on_prompt: bool
    format: Format | None = None
    """Format of the records. None means that the items are samples."""

    def __call__(self, items: Sequence[EncoderInput]) -> TokenChunk:
        fates = [self._fate(item, origin) for item, origin in items]
        kept = [fate for fate in fates if fate.left_out is None]
        sequences = [one for fate in kept for one in fate.sequences]
        why = Counter(fate.left_out for fate in fates)
        return TokenChunk(
            tokens=np.fromiter(chain.from_iterable(one.input_ids for one in sequences), np.uint32),
            mask=np.fromiter(chain.from_iterable(one.mask for one in sequences), np.bool_),
            lengths=np.array([len(one.input_ids) for one in sequences], np.int64),
            truncated=np.array([fate.truncated for fate in kept], np.bool_),
            stop_trained=np.array(
                [all(one.stop_trained for one in self._trained(fate.sequences)) for fate in kept], np.bool_
            ),
            dropped=why["dropped"],
            unsupervised=why["unsupervised"],
            identical=why["identical"],
            long_prompts=sum(fate.long_prompt for fate in fates),
            desirable=self._desirable(kept),
            records=np.array([n for n, fate in enumerate(fates) if fate.left_out is None], np.int64),
        )

    def _fate(self, item: Record | Sample | KLPair, origin: str) -> EncodeResult:
        sample = self._sample(item, origin)
        encoded = encode_sample(sample, self.tokenizer, train_on_prompt=self.train_on_prompt, origin=origin)
        fitted = self._fit(encoded)
        limit = inf if self.max_length is None else self.max_length
        return EncodeResult(
            fitted or encoded,
            left_out=self._left_out(fitted),
            truncated=fitted is not None and fitted[0] is not encoded[0],
            long_prompt=encoded[0].prompt_length > limit,
            desirable=isinstance(sample, UnpairedSample) and sample.desirable,
        )

    def _sample(self, item: Record | Sample | KLPair, origin: str) -> Sample:
        if isinstance(item, KLPair):
            this, other = self._sample(item.record, origin), self._sample(item.kl_record, item.kl_origin)
            assert isinstance(this, UnpairedSample)
            assert isinstance(other, UnpairedSample)
            return replace(this, kl_completion=other.completion)
        if isinstance(item, dict):
            assert self.format is not None
            return normalize(item, self.format, origin)
        return item

    def _fit(self, encoded: list[Encoded]) -> list[Encoded] | None:
        if self.kind != "unpaired":
            return fit(encoded, self.max_length, self.long_samples)
        # The mismatched answer is another sample's; its length must not cut or drop this one.
        answer = fit(encoded[:1], self.max_length, self.long_samples, end_of_prompt=True)
        mismatched = fit(encoded[1:], self.max_length, "truncate", end_of_prompt=True)
        return None if answer is None else answer + (mismatched or [])

    def _left_out(self, fitted: list[Encoded] | None) -> LeftOut | None:
        if fitted is None:
            return "dropped"
        if not all(any(one.mask[1:]) for one in fitted):
            return "unsupervised"
        if self.kind == "preference" and fitted[0].input_ids == fitted[1].input_ids:
            return "identical"
        return None

    def _trained(self, sequences: list[Encoded]) -> list[Encoded]:
        return sequences[:1] if self.kind == "unpaired" else sequences

    def _desirable(self, kept: list[EncodeResult]) -> Bools | None:
        labels = np.array([fate.desirable for fate in kept], np.bool_)
        return labels if self.kind == "unpaired" else None

    def vocab_size(self) -> int:
        """Return the largest token id plus 1; ``len(tokenizer)`` is less if ids have gaps."""
        return max(self.tokenizer.get_vocab().values()) + 1
