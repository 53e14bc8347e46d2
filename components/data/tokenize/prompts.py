"""Prompts for completions, read from files of records and tokenised."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.messages import (
    alpaca_prompt,
    read_string,
    read_template_kwargs,
    read_tools,
    read_turns,
    split_untrained,
    system_turn,
    with_default_system,
)
from components.data.records.options import RecordError, RecordOptions
from components.data.records.record_files import Unreadable, read_records, warn_of_unread_files
from components.data.records.samples import Tool, Turns
from components.data.tokenize.rendered_chat import open_template

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_ANSWERS = ("completion", "chosen", "rejected")
"""Fields of other formats, in which ``prompt`` is the whole prompt."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or as messages, and the record that it comes from."""

    record: Json
    origin: str
    turns: Turns
    tools: list[Tool] | None
    template_kwargs: Json

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the prompt's tokens; after messages, with the beginning of the assistant's turn.

        Raises:
            ConfigError: if the tokenizer has no chat template, or the template refuses or ignores a part of
                the conversation.
        """
        if isinstance(self.turns, str):
            ids: list[int] = tokenizer(self.turns)["input_ids"]
            own: list[int] = tokenizer(self.turns, add_special_tokens=False)["input_ids"]
            # Some tokenizers append the end-of-sequence token, after which a model begins another text.
            return ids[:-1] if ids[-len(own) - 1 :] == [*own, tokenizer.eos_token_id] else ids
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{self.origin}: is a conversation, and the tokenizer has no chat template; use a model "
                "with a chat template, or a prompt that is one string, with strings=plain."
            )
        template = open_template(tokenizer, self.tools, self.template_kwargs, self.origin)
        text = template.render(self.turns, prompt=True)
        template.check_renders_all(self.turns, text, prompt=True)
        chat: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return chat

    def completed(self, completion: Json) -> Json:
        """Return the fields of the record and of ``completion``, as one object.

        Fields of the record whose names are also in ``completion`` become ``record_NAME``.
        """
        own = {name: value for name, value in self.record.items() if name not in completion}
        for name in completion.keys() & self.record.keys():
            other = f"record_{name}"
            while other in own:
                other = f"record_{other}"
            own[other] = self.record[name]
        return own | completion


def _is_alpaca(record: Json) -> bool:
    """Return whether ``prompt`` is the instruction of a record of alpaca."""
    inputs = [record.get(name) for name in ("query", "input")]
    has_more = any(isinstance(value, str) and value for value in inputs)
    has_more |= isinstance(record.get("history"), list) and bool(record["history"])
    return isinstance(record.get("prompt"), str) and has_more and not {*_ANSWERS} & record.keys()


def read_prompts(path: str, options: RecordOptions) -> list[Prompt]:
    """Return the prompts in the files of ``path``.

    A record has ``messages``, ``conversations``, ``prompt``, ``text``, or alpaca's ``instruction``, ``input``
    and ``history``; a conversation may also have ``system``, ``tools`` and ``chat_template_kwargs``.
    The default system turn and the default variables are those of ``options``. If its ``strings`` is
    ``chat``, a string becomes a user turn.

    Raises:
        ConfigError: if a file or a record cannot be read.
    """
    warn_of_unread_files(path)
    return [_read_prompt(record, origin, options) for record, origin in read_records(path)]


def _read_prompt(record: Json | Unreadable, origin: str, options: RecordOptions) -> Prompt:
    if isinstance(record, Unreadable):
        raise record.error
    if any(record.get(name) for name in _MEDIA):
        raise RecordError(f"{origin}: has images, audio or video, and a prompt is text; remove them.")
    tools, kwargs = read_tools(record, origin), read_template_kwargs(record, options, origin)
    for key in ("messages", "conversations", "prompt"):
        if isinstance(record.get(key), list):
            turns, _ = split_untrained(read_turns(record, key, origin))
            if turns[-1]["role"] == "assistant":
                raise RecordError(f"{origin}: {key} ends with an answer; remove that turn from the prompt.")
            return Prompt(record, origin, with_default_system(turns, options), tools, kwargs)
    if record.get("instruction") is not None or _is_alpaca(record):
        turns = with_default_system(alpaca_prompt(record, origin), options)
        return Prompt(record, origin, turns, tools, kwargs)
    key = "text" if record.get("prompt") is None and "text" in record else "prompt"
    text = read_string(record, key, origin)
    if options.strings == "chat":
        turns = [*system_turn(record, origin), {"role": "user", "content": text}]
        return Prompt(record, origin, with_default_system(turns, options), tools, kwargs)
    for name in ("system", "tools", "chat_template_kwargs"):
        if record.get(name):
            raise RecordError(f"{origin}: a prompt that is a string takes no {name}; use strings=chat.")
    return Prompt(record, origin, text, None, {})
