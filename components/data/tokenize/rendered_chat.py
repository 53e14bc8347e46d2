"""A conversation as a tokenizer's chat template renders it, with the offsets of its tokens."""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.options import RecordError
from components.data.records.samples import ChatSample, Message, PreferenceSample, Tool, UnpairedSample
from components.data.tokenize.template_limits import limited_memory, limited_time
from components.json_text import one_line

PROBE = "\ue000"
"""A character of the private use area: no template strips, escapes or tests for it."""
REASONING_END = "</think>"
"""The end of reasoning within the content of an answer."""
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
        because some templates never write it. Reasoning in the content of earlier answers may be missing, but
        not that of the last one.
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
            other = {**message, "content": message["content"] + PROBE}
            is_repeated = bool(content) and any(content in later["content"] for later in messages[i + 1 :])
            if (found := text.find(content, end)) >= 0 and not is_repeated:
                end = found + len(content)
            elif i not in calling and drops([*messages[:i], other, *messages[i + 1 :]]):
                raise self.error(f"does not render message {i}, of the role {message['role']}")
        last = messages[-1]
        thought, tag, answer = last["content"].rpartition(REASONING_END)
        probed = {**last, "content": f"{thought}{PROBE}{tag}{answer}"}
        if tag and last["role"] == "assistant" and drops([*messages[:-1], probed]):
            raise self.error("does not render the reasoning in the content of the last message")

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
