"""Tokenise samples and mark the targets.

The targets of a conversation are by default only the assistant turns with their stop tokens.

The text is rendered by the tokenizer's own chat template; ``assistant_mask`` locates the turns in it.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.data.records.samples import (
    ChatSample,
    CompletionSample,
    Message,
    PreferenceSample,
    Sample,
    SegmentsSample,
    TextSample,
    UnpairedSample,
    is_empty,
)
from components.data.tokenize.assistant_mask import assistant_spans, token_span
from components.data.tokenize.rendered_chat import Conversation, Span, Template, template_for

_PIECE = 2**20  # characters of a long document that are tokenised at once
_AROUND = 2**10
_TRIES = 64
_BORDER = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True)
class Encoded:
    """One sequence of tokens.

    ``mask[t]``: whether token t is a target of the loss. ``prompt_length``: number of tokens before the first
    target; for a pair, number of prompt tokens that both sequences share. ``stop_trained``: whether the token
    that ends the last assistant turn (for a document, the end-of-sequence token) is a target.
    """

    input_ids: Sequence[int]
    mask: Sequence[int]
    prompt_length: int
    stop_trained: bool


def encode_sample(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, train_on_prompt: bool, origin: str
) -> list[Encoded]:
    """Tokenise one sample into one or two sequences.

    A document or a conversation gives one sequence. A pair gives the chosen, then the rejected sequence. An
    unpaired sample gives the sequence with its own completion, then that with the mismatched one.
    ``train_on_prompt`` makes every token a target.

    Raises:
        ConfigError: if the tokenizer has no chat template, its template rejects the messages, or the
            assistant turns cannot be located exactly.
    """
    if isinstance(sample, TextSample):
        return [_encode_document(sample.text, tokenizer)]
    if isinstance(sample, SegmentsSample):
        encoded = [_encode_segments(sample, tokenizer)]
    elif isinstance(sample, CompletionSample):
        encoded = _encode_completions(sample.prompt, [sample.completion], tokenizer)
    elif isinstance(sample, ChatSample):
        encoded = [_encode_chat(sample, template_for(tokenizer, sample, origin), train_on_prompt)]
    else:
        encoded = _encode_answers(sample, tokenizer, origin)
    if isinstance(sample, PreferenceSample):
        encoded = _with_shared_prompt(encoded)
    return [replace(one, mask=[True] * len(one.mask)) for one in encoded] if train_on_prompt else encoded


def _encode_answers(
    sample: PreferenceSample | UnpairedSample, tokenizer: PreTrainedTokenizerBase, origin: str
) -> list[Encoded]:
    prompt, answers = sample.prompt, sample.answers
    if isinstance(prompt, str):
        texts = [answer for answer in answers if isinstance(answer, str)]
        if isinstance(sample, PreferenceSample):
            return _encode_completions(prompt, texts, tokenizer)
        return [one for text in texts for one in _encode_completions(prompt, [text], tokenizer)]
    template = template_for(tokenizer, sample, origin)
    untrained = frozenset(range(len(prompt)))  # assistant turns in the prompt belong to the prompt
    chats = [[*prompt, *answer] for answer in answers if not isinstance(answer, str)]
    return [_encode_turns(chat, template, untrained) for chat in chats]


def _encode_document(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    begin, end = _document_ends(tokenizer)
    input_ids = array("I", begin)  # a list of integers would take ten times the memory of a long document
    for piece in _pieces(text.removesuffix(tokenizer.eos_token or ""), tokenizer):
        input_ids.extend(_plain_ids(piece, tokenizer))
    input_ids.extend(end)
    return Encoded(input_ids, bytes([True]) * len(input_ids), prompt_length=0, stop_trained=bool(end))


def _plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield pieces of a long text that, tokenised one by one, give the tokens of the whole text.

    To tokenise a text at once takes more than a hundred times the memory of the text.
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

    Tokenizers split text into words first. So if a cut before white space does not change the tokens of the
    ``_AROUND`` characters on either side, it changes no token of the whole text.
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


def _encode_segments(sample: SegmentsSample, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Encode each segment by itself, adding no special token to those in the texts."""
    input_ids: list[int] = []
    mask: list[bool] = []
    for text, trained in sample.segments:
        ids = _plain_ids(text, tokenizer)
        input_ids += ids
        mask += [trained] * len(ids)
    stop_trained = bool(mask) and mask[-1] and input_ids[-1] == tokenizer.eos_token_id
    return Encoded(input_ids, mask, _prompt_length(mask), stop_trained)


def _encode_completions(
    prompt: str, completions: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Encode as TRL does: the completions, each with an end-of-sequence token, are targets.

    The targets begin at the first position at which the tokens of the prompt with any of the completions
    differ from those of the prompt by itself. An empty completion has no targets.
    """
    eos, alone = tokenizer.eos_token or "", tokenizer(prompt, verbose=False)["input_ids"]
    texts = (prompt + text.removesuffix(eos) + eos for text in completions)
    wholes = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    first = min(_common_length(alone, whole) for whole in wholes)
    return [
        Encoded(
            whole,
            [t >= first and bool(text.strip()) for t in range(len(whole))],
            first,
            stop_trained=whole[-1] == tokenizer.eos_token_id,
        )
        for whole, text in zip(wholes, completions, strict=True)
    ]


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((t for t, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_shared_prompt(pair: list[Encoded]) -> list[Encoded]:
    """Return the pair with ``prompt_length`` set to the number of prompt tokens that both sequences share.

    A token that spans the border of prompt and answer may differ; then it is not shared.
    """
    common = _common_length(pair[0].input_ids, pair[1].input_ids)
    prompt_length = min(common, *(one.prompt_length for one in pair))
    return [replace(one, prompt_length=prompt_length) for one in pair]


def _encode_chat(sample: ChatSample, template: Template, whole: bool) -> Encoded:
    """Encode a conversation.

    If every token is a target (``whole``), the turns are not located, so the template need not allow that.
    """
    if whole:
        chat = template.conversation(sample.messages)
        return replace(_encoded(chat, [token_span(chat, (0, len(chat.text.rstrip())))]), prompt_length=0)
    return _encode_turns(sample.messages, template, sample.untrained)


def _encode_turns(messages: list[Message], template: Template, untrained: frozenset[int]) -> Encoded:
    """Encode a conversation; its targets are the assistant turns that are neither ``untrained`` nor empty."""
    chat = template.conversation(messages)
    answers = ((i, m) for i, m in enumerate(messages) if m["role"] == "assistant" and i not in untrained)
    said = [i for i, message in answers if not is_empty(message)]
    return _encoded(chat, assistant_spans(chat, said))


def _encoded(chat: Conversation, spans: list[Span]) -> Encoded:
    mask = [False] * len(chat.input_ids)
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    start, stop = spans[-1] if spans else (0, 0)
    stop_trained = start < stop and chat.input_ids[stop - 1] in chat.template.stop_ids
    return Encoded(chat.input_ids, mask, _prompt_length(mask), stop_trained)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token with which the chat template ends an assistant turn.

    None means that the tokenizer has no chat template, that its template ends a turn with other text, or that
    no assistant turn can be located in what it writes.
    """
    chat: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        [one] = encode_sample(ChatSample(chat, None), tokenizer, train_on_prompt=False, origin="a probe")
    except ConfigError:
        return None
    trained = [token for token, on in zip(one.input_ids, one.mask, strict=True) if on]
    return trained[-1] if one.stop_trained else None


def _prompt_length(mask: list[bool]) -> int:
    return mask.index(True) if any(mask) else len(mask)
