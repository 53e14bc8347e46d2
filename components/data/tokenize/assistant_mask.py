"""Locate the assistant turns exactly in a conversation rendered by a tokenizer's chat template.

If the template has generation marks, they give the turns. Otherwise the template is rendered again and the
texts are compared:

* a turn begins at the end of the rendering of the messages before it, with the generation prompt;
* it ends at the end of the rendering up to and including the turn, without trailing whitespace.

Both renderings must be prefixes of the whole text. They are not if the template writes a turn differently
when more turns follow (it drops earlier reasoning, or moves the tools). Then the turn begins where a probe
character that replaces its content would be, if the text before it is the same. Otherwise the probe is
inserted at the edge of the turn's reasoning or content, or after the name of its last call, and its position
is used only if the whole text is otherwise unchanged. If all methods fail, an error is raised. The text is
never searched for headers, so an answer that looks like a header is not mistaken for one.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import eq

from transformers.utils.chat_template_utils import render_jinja_template

from components.data.records.messages import REASONING_KEYS
from components.data.records.options import RecordError
from components.data.records.samples import Message
from components.data.tokenize.rendered_chat import PROBE, Conversation, Span

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def assistant_spans(chat: Conversation, wanted: Sequence[int]) -> list[Span]:
    """Return the span of tokens of each assistant turn in ``wanted`` (message indices), with its stop token.

    Raises:
        ConfigError: if a turn cannot be located.
    """
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if _MARKS.search(chat.template.source):
        marked = zip(turns, _marked(chat, len(turns)), strict=True)
        spans = [_with_stop(chat, turn, span) for turn, span in marked if turn in wanted]
    else:
        spans = [_locate(chat, turn) for turn in wanted]
    return [token_span(chat, span) for span in spans]


def _locate(chat: Conversation, turn: int) -> Span:
    start, end = _start(chat, turn), _end(chat, turn)
    if start is None or end is None or start >= end:
        raise chat.template.error(
            f"rewrites the text so that message {turn}, the assistant's, cannot be located in it",
            "Put {% generation %} marks around the assistant turns of the template",
        )
    return start, end


def _start(chat: Conversation, turn: int) -> int | None:
    earlier, text = chat.messages[:turn], chat.text
    before = chat.template.render(earlier, prompt=True)
    if before == chat.template.render(earlier) or not text.startswith(before):
        # No generation prompt, or one with text that the template leaves out of a finished turn.
        before = _before_answer(chat, turn, before)
    if text.startswith(before):
        return len(before)
    before = _before_content(chat, turn)
    if before and text.startswith(before):
        return len(before)
    message = chat.messages[turn]
    keys = (*(key for key in REASONING_KEYS if isinstance(message.get(key), str)), "content")
    positions = (_position(chat, turn, _probed(message, key, at_end=False)) for key in keys)
    return next((position for position in positions if position is not None), None)


def _before_answer(chat: Conversation, turn: int, prompt: str) -> str:
    """Return the text that the template writes before an assistant turn that has only content.

    If the template adds nothing but whitespace to ``prompt``, ``prompt`` is returned, because such whitespace
    belongs to the answer.
    """
    probed = chat.template.render([*chat.messages[:turn], {"role": "assistant", "content": PROBE}])
    before, probe, _ = probed.partition(PROBE)
    is_header = not before.startswith(prompt) or before[len(prompt) :].strip()
    return before if probe and is_header else prompt


def _before_content(chat: Conversation, turn: int) -> str:
    """Return the text before the content of an assistant turn that has no reasoning.

    It is empty if the template does not write the content.
    """
    message = {key: value for key, value in chat.messages[turn].items() if key in ("role", "tool_calls")}
    messages = [*chat.messages[:turn], {**message, "content": PROBE}, *chat.messages[turn + 1 :]]
    before, probe, _ = chat.template.render(messages).partition(PROBE)
    return before if probe else ""


def _end(chat: Conversation, turn: int) -> int | None:
    """Return the position in the text at which the turn's stop token ends.

    None means that the rendered texts do not determine this position.
    """
    last = turn == len(chat.messages) - 1
    through = chat.text if last else chat.template.render(chat.messages[: turn + 1])
    if chat.text.startswith(through.rstrip()):
        return len(through.rstrip())
    probed = _probed_end(chat.messages[turn])
    has_calls = "tool_calls" in probed
    # The name of a call may be written again with its result; the comparison with ``closing`` covers that.
    if (end := _position(chat, turn, probed, count=-1 if has_calls else 1)) is None:
        return None
    alone = chat.template.render([*chat.messages[:turn], probed])
    closing = alone[alone.find(PROBE) + 1 :].replace(PROBE, "").rstrip()
    if chat.text.startswith(closing, end):
        return end + len(closing)
    return None if has_calls else _after_other_stop(chat, turn, end, closing)


def _probed_end(message: Message) -> Message:
    """Return a copy of the message with the probe after the name of its last call, or else its content."""
    if "tool_calls" not in message:
        return _probed(message, at_end=True)
    *calls, last = message["tool_calls"]
    function = {**last["function"], "name": last["function"]["name"] + PROBE}
    return {**message, "tool_calls": [*calls, {**last, "function": function}]}


def _after_other_stop(chat: Conversation, turn: int, end: int, closing: str) -> int:
    """Return the end of the stop token after ``end`` if the template ends the last turn with another one.

    ``closing`` is what the template writes after the last turn. If it does not begin with a stop token, or if
    the token after ``end`` may belong to the next header, ``end`` is returned. Whitespace before these tokens
    belongs to the answer.
    """
    first = chat.template.token_ids(closing.lstrip())[:1]
    content = _position(chat, turn + 1, _probed(chat.messages[turn + 1], at_end=False))
    if not first or content is None:
        return end
    begin = len(chat.text) - len(chat.text[end:].lstrip())
    token = bisect_left(chat.offsets, (begin, begin + 1), hi=len(chat.offsets) - 1)
    start, stop = chat.offsets[token]
    are_stops = start == begin and {*first, chat.input_ids[token]} <= chat.template.stop_ids
    has_header = bool(chat.text[stop:content].strip())
    return stop if are_stops and has_header and _precedes_header(chat, turn, token) else end


def _precedes_header(chat: Conversation, turn: int, token: int) -> bool:
    """Return whether the token after a turn is certainly not in the header of the next message.

    It must follow the turn also before an assistant turn, and not be in the header of an assistant turn.
    """
    template, earlier = chat.template, chat.messages[:turn]
    alone, asked = template.render(earlier), template.render(earlier, prompt=True)
    if asked == alone:  # no generation prompt
        asked = _before_answer(chat, turn, asked)
    ids = template.token_ids(asked)
    header = ids[[*map(eq, ids, template.token_ids(alone)), False].index(False) :]
    if not header or chat.input_ids[token] in header:
        return False
    answer = {"role": "assistant", "content": PROBE}
    try:
        followed = template.render([*earlier, chat.messages[turn], answer])
    except RecordError:  # it refuses two assistant turns in a row
        return False
    return followed.startswith(chat.text[: chat.offsets[token][1]])


def _position(chat: Conversation, turn: int, probed: Message, *, count: int = 1) -> int | None:
    """Return the first place of the probe in ``probed``, a copy of a turn.

    None means that the probe changes other text, or is written more than ``count`` times, unless that is -1.
    """
    text = chat.template.render([*chat.messages[:turn], probed, *chat.messages[turn + 1 :]])
    return text.index(PROBE) if text.replace(PROBE, "", count) == chat.text != text else None


def _probed(message: Message, key: str = "content", *, at_end: bool) -> Message:
    """Return a copy of the message with the probe before the first or after the last visible character.

    Whitespace around the text under ``key`` stays outside of the probe, because many templates trim it.
    """
    text = message[key]
    edge = len(text.rstrip()) if at_end else len(text) - len(text.lstrip())
    return {**message, key: text[:edge] + PROBE + text[edge:]}


def _marked(chat: Conversation, num_turns: int) -> list[Span]:
    """Return the spans between generation marks, in characters, one for each assistant turn.

    ``render_jinja_template`` gives the spans, because ``apply_chat_template`` converts them to tokens and
    loses the last bytes of an emoji.

    Raises:
        RecordError: if the number of spans is not ``num_turns``.
    """
    template = chat.template
    [text], [marked] = render_jinja_template(
        conversations=[template.with_fitting_arguments(chat.messages)],
        tools=template.tools,
        chat_template=template.source,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **{**template.tokenizer.special_tokens_map, **template.kwargs},
    )
    assert text == chat.text
    spans = [(start, end) for start, end in marked if start < end]
    roles = [message["role"] for message in chat.messages]
    if len(spans) > num_turns:
        # The text need not show where the second of two assistant turns in a row begins.
        is_clear = ("assistant", "assistant") not in pairwise(roles)
        spans = _joined(spans, text, None if is_clear else template.tokenizer.eos_token or "")
    if len(spans) != num_turns:
        raise template.error(
            f"has {{% generation %}} marks around {len(spans)} of {num_turns} assistant turns",
            "Put the marks around every assistant turn with its stop token, remove them",
        )
    return spans


def _joined(spans: list[Span], text: str, only: str | None) -> list[Span]:
    """Join spans with nothing but whitespace between them, such as a turn and its end-of-sequence token.

    If ``only`` is not None, a span is joined to the one before it only if this is its text.
    """
    joined = spans[:1]
    for start, end in spans[1:]:
        first, before = joined[-1]
        if text[before:start].strip() or (only is not None and text[start:end].strip() != only):
            joined.append((start, end))
        else:
            joined[-1] = (first, end)
    return joined


def _with_stop(chat: Conversation, turn: int, marked: Span) -> Span:
    """Return a marked span with its end moved to the end of the stop token.

    Many templates end the mark before the stop token, and some after the line break that follows this token.
    If there is anything else between the two ends, the span is unchanged.
    """
    start, stop = marked
    end = _end(chat, turn)
    if end is None:
        return marked
    between = range(*token_span(chat, (min(stop, end), max(stop, end))))
    closing = all(chat.input_ids[t] in chat.template.stop_ids or _is_blank(chat, t) for t in between)
    return (start, end) if closing else marked


def _is_blank(chat: Conversation, token: int) -> bool:
    start, end = chat.offsets[token]
    return not chat.text[start:end].strip()


def token_span(chat: Conversation, span: Span) -> Span:
    """Return the span of tokens for a span of characters.

    A token that begins before the span of characters is left out, because it is partly prompt.
    """
    start, end = span
    first = bisect_left(chat.offsets, (start, start + 1))
    stop = bisect_left(chat.offsets, (end, end), lo=first)
    # A stop token may include the line break after it; no other token may extend beyond the turn.
    while stop > first and chat.text[end : chat.offsets[stop - 1][1]].strip():
        stop -= 1
    return first, stop
