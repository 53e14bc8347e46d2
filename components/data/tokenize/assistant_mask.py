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

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import eq

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.messages import REASONING_KEYS
from components.data.records.options import RecordError
from components.data.records.samples import ChatSample, Message, PreferenceSample, Tool, UnpairedSample
from components.data.tokenize.template_limits import limited_memory, limited_time
from components.json_text import one_line

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "\ue000"  # in the private use area: no template strips, escapes or tests for it

FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of templates that refuse a conversation or have a mistake."""

Span = tuple[int, int]
"""Begin and end, in characters or in tokens."""


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, applied to one record."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Tool] | None
    kwargs: Json
    """Further variables of the template."""
    source: str
    stop_ids: frozenset[int]
    """Tokens that can end a turn: all special tokens, including the end-of-sequence token."""
    origin: str

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        """Return the text of the messages; if ``prompt``, it ends with the header of an assistant turn.

        Raises:
            RecordError: if the template refuses the messages or fails.
        """
        fitting = self.with_fitting_arguments(messages)
        try:
            with limited_memory(), limited_time():
                text: str = self.tokenizer.apply_chat_template(
                    fitting, tools=self.tools, tokenize=False, add_generation_prompt=prompt, **self.kwargs
                )
                return text
        except FAILURES as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise self.error(f"refuses this conversation ({reason})") from error

    def with_fitting_arguments(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the arguments of calls as JSON text if the template needs that."""
        has_calls = any(message.get("tool_calls") for message in messages)
        if not has_calls or not _needs_text(self.tokenizer, self.source):
            return messages
        return [_with_arguments_as_text(message) for message in messages]

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def conversation(self, messages: list[Message]) -> "Conversation":
        """Render and tokenise ``messages``, adding no special token to those that the template writes.

        Raises:
            RecordError: if the template refuses the messages or ignores a part of them.
        """
        text = self.render(messages)
        self.check_renders_all(messages, text)
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Conversation(self, messages, text, out["input_ids"], out["offset_mapping"])

    def check_renders_all(self, messages: list[Message], text: str, *, prompt: bool = False) -> None:
        """Raise RecordError if the template ignores the content of a turn, the tools or the tool calls.

        It ignores them if ``text``, the result of ``render``, stays the same without the tools, without all
        tool calls, or with another content. A content that follows the previous one in the text, and is not
        part of a later one, is not rendered again. The content of a turn that calls tools may be missing,
        because some templates never write it.
        """

        def drops(changed: list[Message], template: Template = self) -> bool:
            try:
                return template.render(changed, prompt=prompt) == text
            except RecordError:  # it looks at what was changed
                return False

        if self.tools and drops(messages, replace(self, tools=None)):
            raise self.error("does not render tools")
        calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        plain = [
            {key: value for key, value in message.items() if key != "tool_calls"} for message in messages
        ]
        if calling and drops(plain):
            raise self.error("does not render tool_calls")
        end = 0
        for i, message in enumerate(messages):
            content = message["content"].strip()
            other = {**message, "content": message["content"] + _PROBE}
            is_repeated = bool(content) and any(content in later["content"] for later in messages[i + 1 :])
            if (found := text.find(content, end)) >= 0 and not is_repeated:
                end = found + len(content)
            elif i not in calling and drops([*messages[:i], other, *messages[i + 1 :]]):
                raise self.error(f"does not render message {i}, of the role {message['role']}")

    def error(self, what: str, remedy: str = "Change the record") -> RecordError:
        where = f"it is model.chat_template, or else that of model.tokenizer={self.tokenizer.name_or_path}"
        return RecordError(
            f"{self.origin}: the chat template {what}.\n{remedy}, or use another template ({where})."
        )


@lru_cache(maxsize=8)
def _needs_text(tokenizer: PreTrainedTokenizerBase, source: str) -> bool:
    """Return whether the template writes the arguments of a call only if they are JSON text.

    Some templates, such as DeepSeek-V3's, concatenate the arguments with other text. A call with a string
    decides this for all records, so that a value of another type does not change how calls are written.
    """
    function = {"name": "f", "arguments": {"a": "b"}}
    call = {"type": "function", "id": "call00000", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    question = {"role": "user", "content": "a"}

    def failure(answer: Message) -> Exception | None:
        try:
            with limited_memory(), limited_time():
                tokenizer.apply_chat_template([question, answer], chat_template=source, tokenize=False)
        except FAILURES as error:
            return error
        return None

    return isinstance(failure(answer), TypeError) and failure(_with_arguments_as_text(answer)) is None


def _with_arguments_as_text(message: Message) -> Message:
    calls = [{**call, "function": _as_text(call["function"])} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(function: Json) -> Json:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, rendered and tokenised."""

    template: Template
    messages: list[Message]
    text: str
    input_ids: list[int]
    offsets: list[Span]
    """The span of characters that each token covers."""


Conversational = ChatSample | PreferenceSample | UnpairedSample


def template_for(tokenizer: PreTrainedTokenizerBase, sample: Conversational, origin: str) -> Template:
    """Return the template for the sample.

    Raises:
        ConfigError: if the tokenizer has no chat template or is not a fast one, or if the template does not
            read a variable of the sample.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.tokenizer: {name} has no chat template, and {origin} is a conversation.\n"
            "Name the tokenizer of a chat model, set model.chat_template, or train on text with stage=pt."
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer: {name} is a slow tokenizer, without the character offsets of tokens that the "
            "assistant mask needs. Use its fast version (with a tokenizer.json)."
        )
    return open_template(tokenizer, sample.tools, sample.template_kwargs, origin)


def open_template(
    tokenizer: PreTrainedTokenizerBase, tools: list[Tool] | None, kwargs: Json, origin: str
) -> Template:
    """Return the template of the tokenizer, which has one.

    Raises:
        ConfigError: if it has several and none is the default, or the template does not read a variable of
            ``kwargs``.
    """
    try:
        source = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates, none of which is the default
        name = tokenizer.name_or_path
        raise ConfigError(f"model.tokenizer: {name}: {one_line(error)}; set model.chat_template.") from error
    template = Template(tokenizer, tools, kwargs, source, _stop_ids(tokenizer), origin)
    unknown = [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", source)]
    if unknown:
        raise template.error(f"does not read {', '.join(unknown)}", "Remove it from chat_template_kwargs")
    return template


@lru_cache(maxsize=8)
def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


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
    probed = chat.template.render([*chat.messages[:turn], {"role": "assistant", "content": _PROBE}])
    before, probe, _ = probed.partition(_PROBE)
    is_header = not before.startswith(prompt) or before[len(prompt) :].strip()
    return before if probe and is_header else prompt


def _before_content(chat: Conversation, turn: int) -> str:
    """Return the text before the content of an assistant turn that has no reasoning.

    It is empty if the template does not write the content.
    """
    message = {key: value for key, value in chat.messages[turn].items() if key in ("role", "tool_calls")}
    messages = [*chat.messages[:turn], {**message, "content": _PROBE}, *chat.messages[turn + 1 :]]
    before, probe, _ = chat.template.render(messages).partition(_PROBE)
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
    closing = alone[alone.find(_PROBE) + 1 :].replace(_PROBE, "").rstrip()
    if chat.text.startswith(closing, end):
        return end + len(closing)
    return None if has_calls else _after_other_stop(chat, turn, end, closing)


def _probed_end(message: Message) -> Message:
    """Return a copy of the message with the probe after the name of its last call, or else its content."""
    if "tool_calls" not in message:
        return _probed(message, at_end=True)
    *calls, last = message["tool_calls"]
    function = {**last["function"], "name": last["function"]["name"] + _PROBE}
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
    answer = {"role": "assistant", "content": _PROBE}
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
    return text.index(_PROBE) if text.replace(_PROBE, "", count) == chat.text != text else None


def _probed(message: Message, key: str = "content", *, at_end: bool) -> Message:
    """Return a copy of the message with the probe before the first or after the last visible character.

    Whitespace around the text under ``key`` stays outside of the probe, because many templates trim it.
    """
    text = message[key]
    edge = len(text.rstrip()) if at_end else len(text) - len(text.lstrip())
    return {**message, key: text[:edge] + _PROBE + text[edge:]}


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
