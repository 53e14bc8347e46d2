"""Truncation of samples that are longer than ``data.max_length``."""

from dataclasses import replace
from typing import Literal

from components.data.tokenize.chat import Encoded

LongSamples = Literal["truncate", "drop"]


def fit(
    encoded: list[Encoded], max_length: int | None, long_samples: LongSamples, *, end_of_prompt: bool = False
) -> list[Encoded] | None:
    """Return the sequences of one sample, truncated to ``max_length``. None means that the sample is dropped.

    If all of them fit, the same list is returned. A document or a conversation keeps its beginning. A pair
    keeps its answers and the end of its prompt: the prompt loses as many of its first tokens as the longer
    answer needs, the same in both sequences, but keeps its last token; an answer that is still too long loses
    its end. With ``end_of_prompt``, the rule for pairs applies to a single sequence, too, such as a
    conversation of which only the last turn is trained on.
    """
    if max_length is None or all(len(one.input_ids) <= max_length for one in encoded):
        return encoded
    if long_samples == "drop":
        return None
    if len(encoded) == 1 and not end_of_prompt:
        return [_cut(encoded[0], 0, max_length)]
    prompt = encoded[0].prompt_length
    answer = max(len(one.input_ids) - prompt for one in encoded)
    kept = min(prompt, max(1, max_length - answer))
    return [_cut(one, prompt - kept, max_length) for one in encoded]


def _cut(one: Encoded, start: int, max_length: int) -> Encoded:
    stop = start + max_length
    return replace(
        one,
        input_ids=one.input_ids[start:stop],
        mask=one.mask[start:stop],
        prompt_length=one.prompt_length - start,
        stop_trained=one.stop_trained and not any(one.mask[stop:]),
    )
