"""Where the assistant speaks in a conversation that a tokenizer's chat template has rendered, exactly.

Where the template carries generation marks, they say so. Where it does not, the template is rendered again
and the texts are compared:

* a turn begins where the rendering of the messages before it, with the generation prompt, ends;
* it ends where the rendering up to and with the turn ends, trailing whitespace aside.

Both have to be a prefix of the whole text. A template that writes a turn differently once others follow (it
drops earlier reasoning, it moves the tools) breaks that; then a probe character is put at the edge of the
turn's content, and counts only if the whole text is otherwise unchanged. What neither can locate is an error.
Nothing is ever searched for in the text, so an answer that looks like a header cannot mislead it.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from components.contracts.errors import ConfigError
from components.data.records.samples import ChatSample, Message, PreferenceSample, Tool, UnpairedSample

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "\ue000"  # of the private use area: no template strips it, escapes it or tests for it

Span = tuple[int, int]
"""Begin and end of characters, or of tokens."""


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template at work on one record."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Tool] | None
    source: str
    stop_ids: frozenset[int]
    """Tokens that can end a turn: the special ones, among them the end-of-sequence token."""
    origin: str

    def render(self, messages: list[Message], *, prompt: bool = False) -> str:
        """The text of the messages; ``prompt``: and of the header that asks the assistant to speak."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason, _, _ = str(error).partition("\n")
            raise self.error(f"refuses this conversation ({reason})") from error

    def conversation(self, messages: list[Message]) -> "Conversation":
        """The whole text, in tokens. No special token is added to those that the template wrote."""
        text = self.render(messages)
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Conversation(self, messages, text, out["input_ids"], out["offset_mapping"])

    def error(self, what: str, remedy: str = "Change the record, or name another tokenizer.") -> ConfigError:
        name = self.tokenizer.name_or_path
        return ConfigError(f"{self.origin}: the chat template of model.tokenizer={name} {what}.\n{remedy}")


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, rendered and in tokens."""

    template: Template
    messages: list[Message]
    text: str
    input_ids: list[int]
    offsets: list[Span]
    """The characters that each token covers."""


Conversational = ChatSample | PreferenceSample | UnpairedSample


def template_for(tokenizer: PreTrainedTokenizerBase, sample: Conversational, origin: str) -> Template:
    """The template for the sample; one without a place for its tools would drop them unsaid."""
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.tokenizer: {name} has no chat template, and {origin} is a conversation.\n"
            "Name the tokenizer of a chat model, or train on text with stage=pt."
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer: {name} cannot tell which characters a token covers. "
            "Use its fast version (with a tokenizer.json)."
        )
    source = tokenizer.get_chat_template(tools=sample.tools)
    template = Template(tokenizer, sample.tools, source, _stop_ids(tokenizer), origin)
    for key, used in {"tools": bool(sample.tools), "tool_calls": _calls_tools(sample)}.items():
        if used and key not in source:
            raise template.error(f"does not render {key}")
    return template


def _calls_tools(sample: Conversational) -> bool:
    if isinstance(sample, ChatSample):
        messages = sample.messages
    elif isinstance(sample, PreferenceSample):
        messages = [*sample.prompt, *sample.chosen, *sample.rejected]
    else:
        messages = [*sample.prompt, *sample.completion, *sample.kl_completion]
    return any("tool_calls" in message for message in messages)


@lru_cache(maxsize=8)
def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def assistant_spans(chat: Conversation, first: int = 0) -> list[Span]:
    """The tokens of every assistant turn among ``messages[first:]`` with its stop token, or a ConfigError."""
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if _MARKS.search(chat.template.source):
        marked = zip(turns, _marked(chat, len(turns)), strict=True)
        spans = [_with_stop(chat, turn, span) for turn, span in marked if turn >= first]
    else:
        spans = [_locate(chat, turn) for turn in turns if turn >= first]
    return [token_span(chat, span) for span in spans]


def _locate(chat: Conversation, turn: int) -> Span:
    start, end = _start(chat, turn), _end(chat, turn)
    if start is None or end is None or start >= end:
        raise chat.template.error(
            f"rewrites the text so that message {turn}, the assistant's, cannot be located in it",
            "Put {% generation %} marks around its assistant turns, or name another tokenizer.",
        )
    return start, end


def _start(chat: Conversation, turn: int) -> int | None:
    earlier, text = chat.messages[:turn], chat.text
    before = chat.template.render(earlier, prompt=True)
    if before == chat.template.render(earlier) or not text.startswith(before):
        # No generation prompt, or one that goes on to what the template leaves out of a finished turn.
        before = _before_answer(chat, turn, before)
    return len(before) if text.startswith(before) else _edge(chat, turn, at_end=False)


def _before_answer(chat: Conversation, turn: int, prompt: str) -> str:
    """What precedes a plain answer at that place. A space between it and the prompt is the answer's own."""
    probed = chat.template.render([*chat.messages[:turn], {"role": "assistant", "content": _PROBE}])
    before, probe, _ = probed.partition(_PROBE)
    is_header = not before.startswith(prompt) or before[len(prompt) :].strip()
    return before if probe and is_header else prompt


def _end(chat: Conversation, turn: int) -> int | None:
    """Past the stop token; None where the template's texts do not tell."""
    last = turn == len(chat.messages) - 1
    through = chat.text if last else chat.template.render(chat.messages[: turn + 1])
    if chat.text.startswith(through.rstrip()):
        return len(through.rstrip())
    end = _edge(chat, turn, at_end=True)
    if end is None:
        return None
    alone = chat.template.render([*chat.messages[:turn], _probed(chat.messages[turn], at_end=True)])
    closing = alone[alone.find(_PROBE) + 1 :].rstrip()
    return end + len(closing) if chat.text.startswith(closing, end) else end


def _edge(chat: Conversation, turn: int, *, at_end: bool) -> int | None:
    """Where the content of a turn begins or ends, if a probe put there leaves all else as it was."""
    message = _probed(chat.messages[turn], at_end=at_end)
    probed = chat.template.render([*chat.messages[:turn], message, *chat.messages[turn + 1 :]])
    return probed.index(_PROBE) if probed.replace(_PROBE, "", 1) == chat.text != probed else None


def _probed(message: Message, *, at_end: bool) -> Message:
    """Inside of the whitespace around the content, which many templates trim."""
    content = message["content"]
    edge = len(content.rstrip()) if at_end else len(content) - len(content.lstrip())
    return {**message, "content": content[:edge] + _PROBE + content[edge:]}


def _marked(chat: Conversation, num_turns: int) -> list[Span]:
    """What stands between generation marks, one span for every assistant turn.

    From the renderer: ``apply_chat_template`` gives them in tokens, and loses the last bytes of an emoji.
    """
    template = chat.template
    [text], [marked] = render_jinja_template(
        conversations=[chat.messages],
        tools=template.tools,
        chat_template=template.source,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **template.tokenizer.special_tokens_map,
    )
    assert text == chat.text
    spans = [(start, end) for start, end in marked if start < end]
    if len(spans) != num_turns:
        raise template.error(
            f"has {{% generation %}} marks around {len(spans)} of {num_turns} assistant turns",
            "Put the marks around every assistant turn with its stop token, or remove them.",
        )
    return spans


def _with_stop(chat: Conversation, turn: int, marked: Span) -> Span:
    """Many templates end the mark before the stop token, some after the line break behind it."""
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
    """The tokens of some characters. One that reaches in from before is left out: it is partly prompt."""
    start, end = span
    first = bisect_left(chat.offsets, (start, start + 1))
    stop = bisect_left(chat.offsets, (end, end), lo=first)
    # A stop token may have swallowed the line break after it; no other token may reach beyond the turn.
    while stop > first and chat.text[end : chat.offsets[stop - 1][1]].strip():
        stop -= 1
    return first, stop
