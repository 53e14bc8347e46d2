"""Prompts to complete, from files of records to tokens."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.messages import read_string, read_tools, read_turns
from components.data.records.options import RecordError
from components.data.records.record_files import Unreadable, read_records
from components.data.records.samples import Tool, Turns
from components.data.tokenize.assistant_mask import Template


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or as messages, and the record that it comes from."""

    record: Json
    origin: str
    turns: Turns
    tools: list[Tool] | None

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the prompt's tokens; after messages, with the beginning of the assistant's turn.

        Raises:
            ConfigError: if the tokenizer has no chat template, or the template refuses the messages.
        """
        if isinstance(self.turns, str):
            ids: list[int] = tokenizer(self.turns)["input_ids"]
            return ids
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{self.origin}: is a conversation, and the model has no chat template; use strings=plain."
            )
        template = Template(tokenizer, self.tools, {}, "", frozenset(), self.origin)
        text = template.render(self.turns, prompt=True)
        chat: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return chat


def read_prompts(path: str, *, chat: bool) -> list[Prompt]:
    """Return the prompts in the files of ``path``.

    A record has ``messages``, ``conversations``, ``prompt`` or ``text``. With ``chat``, a string becomes a
    user turn.

    Raises:
        ConfigError: if a file or a record cannot be read.
    """
    return [_read_prompt(record, origin, chat=chat) for record, origin in read_records(path)]


def _read_prompt(record: Json | Unreadable, origin: str, *, chat: bool) -> Prompt:
    if isinstance(record, Unreadable):
        raise record.error
    tools = read_tools(record, origin)
    for key in ("messages", "conversations", "prompt"):
        if isinstance(record.get(key), list):
            return Prompt(record, origin, read_turns(record, key, origin), tools)
    key = "text" if record.get("prompt") is None and "text" in record else "prompt"
    text = read_string(record, key, origin)
    if not chat and record.get("system"):
        raise RecordError(f"{origin}: a prompt that is a string takes no system turn; use strings=chat.")
    return Prompt(record, origin, [{"role": "user", "content": text}] if chat else text, tools)
