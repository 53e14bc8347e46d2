"""Tokenise samples and mark the targets: in a conversation, only assistant turns with their stop token.

The text is rendered by the tokenizer's own chat template; ``assistant_mask`` locates the turns in it.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from transformers import PreTrainedTokenizerBase

from components.data.records.samples import Message, PreferenceSample, Sample, TextSample, UnpairedSample
from components.data.tokenize.assistant_mask import (
    Conversation,
    Span,
    Template,
    assistant_spans,
    template_for,
    token_span,
)

_PIECE = 2**20  # characters of a long document that are tokenised at once
_AROUND = 2**10
_TRIES = 64
_BORDER = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True)
class Encoded:
    """One sequence of tokens.

    ``mask[t]``: whether token t is a target of the loss. ``prompt_length``: number of tokens before the first
    target; for a pair, of the prompt that both sequences begin with. ``stop_trained``: whether the token that
    ends the last assistant turn (for a document, the end-of-sequence token) is a target.
    """

    input_ids: Sequence[int]
    mask: Sequence[int]
    prompt_length: int
    stop_trained: bool


def encode_sample(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, train_on_prompt: bool, origin: str
) -> list[Encoded]:
    """Tokenise one sample into one or two sequences.

    A document or a conversation gives one sequence, a pair the chosen, then the rejected one, and an unpaired
    sample its completion, then the mismatched one. ``train_on_prompt`` makes every token a target.

    Raises:
        ConfigError: if the tokenizer has no chat template, its template rejects the messages, or the
            assistant turns cannot be located exactly.
    """
    if isinstance(sample, TextSample):
        return [_encode_document(sample.text, tokenizer)]
    template = template_for(tokenizer, sample, origin)
    if isinstance(sample, PreferenceSample):
        encoded = _encode_pair(sample, template)
    elif isinstance(sample, UnpairedSample):
        encoded = _encode_answers(sample.prompt, [sample.completion, sample.kl_completion], template)
    else:
        # If every token is a target, no turn has to be located, and any template will do.
        encode_chat = _encode_whole if train_on_prompt else _encode_turns
        encoded = [encode_chat(sample.messages, template)]
    return [replace(one, mask=[True] * len(one.mask)) for one in encoded] if train_on_prompt else encoded


def _encode_document(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    begin, end = _document_ends(tokenizer)
    input_ids = array("I", begin)  # a list of integers would take ten times the memory of a long document
    for piece in _pieces(text, tokenizer):
        input_ids.extend(_plain_ids(piece, tokenizer))
    input_ids.extend(end)
    return Encoded(input_ids, bytes([True]) * len(input_ids), prompt_length=0, stop_trained=bool(end))


def _plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield pieces of a long text whose tokens are those of the text.

    A tokenizer takes more than a hundred times the memory of the text that it gets at once.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        stop = _harmless_cut(text, start + _PIECE, tokenizer)
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _harmless_cut(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the first place after ``start`` at which cutting changes no token, or the end of the text.

    Tokenizers split text into words first. So a cut before white space that leaves the tokens of the
    ``_AROUND`` characters on both sides as they are does so for the whole text.
    """
    for border in islice(_BORDER.finditer(text, start), _TRIES):
        at = border.start()
        left, right = text[at - _AROUND : at], text[at : at + _AROUND]
        if _plain_ids(left, tokenizer) + _plain_ids(right, tokenizer) == _plain_ids(left + right, tokenizer):
            return at
    return len(text)


@lru_cache(maxsize=8)
def _document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before a document (if the tokenizer adds them by itself) and after it."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = bos is not None and bos in tokenizer("")["input_ids"]
    return [bos] if begins else [], [] if eos is None else [eos]


def _encode_pair(sample: PreferenceSample, template: Template) -> list[Encoded]:
    pair = _encode_answers(sample.prompt, [sample.chosen, sample.rejected], template)
    both = zip(pair[0].input_ids, pair[1].input_ids, strict=False)
    shortest = min(len(one.input_ids) for one in pair)
    common = next((t for t, (chosen, rejected) in enumerate(both) if chosen != rejected), shortest)
    # A token that spans the border of prompt and answer may differ; then it is not shared.
    prompt_length = min(common, *(one.prompt_length for one in pair))
    return [replace(one, prompt_length=prompt_length) for one in pair]


def _encode_answers(prompt: list[Message], answers: list[list[Message]], template: Template) -> list[Encoded]:
    """Encode with only the answers as targets: assistant turns in the prompt belong to the prompt."""
    return [_encode_turns([*prompt, *answer], template, len(prompt)) for answer in answers]


def _encode_whole(messages: list[Message], template: Template) -> Encoded:
    chat = template.conversation(messages)
    return replace(_encoded(chat, [token_span(chat, (0, len(chat.text.rstrip())))]), prompt_length=0)


def _encode_turns(messages: list[Message], template: Template, first: int = 0) -> Encoded:
    """Encode with the assistant turns among ``messages[first:]`` as targets."""
    chat = template.conversation(messages)
    return _encoded(chat, assistant_spans(chat, first))


def _encoded(chat: Conversation, spans: list[Span]) -> Encoded:
    mask = [False] * len(chat.input_ids)
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    prompt_length = mask.index(True) if any(mask) else len(mask)
    start, stop = spans[-1]
    stop_trained = start < stop and chat.input_ids[stop - 1] in chat.template.stop_ids
    return Encoded(chat.input_ids, mask, prompt_length, stop_trained)
