"""The options of the ``data`` group that determine how records become samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json

Format = Literal[
    "text", "prompt_completion", "segments", "alpaca", "sharegpt", "messages", "preference", "unpaired"
]

ROLES = ("system", "user", "assistant", "tool")
SPELLINGS = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "developer": "system",
    "function": "tool",
}
"""Another name of a role in records -> the role."""

FIELDS = (
    *("text", "prompt", "completion", "instruction", "input", "query", "output", "response", "system"),
    *("segments", "messages", "conversations", "chosen", "rejected", "chosen_messages", "rejected_messages"),
    *("history", "tools", "label", "kto_tag", "margin", "chat_template_kwargs", "images", "videos", "audios"),
)
MESSAGE_KEYS = ("role", "content", "train")
RESERVED = (
    *("messages", "tools", "tokenize", "add_generation_prompt", "chat_template"),
    "continue_final_message",
)
"""Arguments of ``apply_chat_template`` that the program sets, so ``chat_template_kwargs`` may not."""


class RecordError(ConfigError):
    """A mistake in one record."""


@dataclass(frozen=True)
class RecordOptions:
    """Options by which the records of a source become samples; conf/data/files.yaml describes each one."""

    format: Literal["auto"] | Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Name of a field, or one of ``MESSAGE_KEYS`` for messages -> its name in the records."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Name of a role in the records -> the role that it stands for."""
    only_columns: bool = False
    """Whether fields that ``columns`` does not name are left unread."""
    ignore_fields: tuple[str, ...] = ()
    strings: Literal["plain", "chat"] = "plain"
    default_system: str | None = None
    mask_history: bool = False
    chat_template_kwargs: Json = field(default_factory=dict)
    on_bad_record: Literal["stop", "skip"] = "stop"
    train_on_prompt: bool = False
    ranked: bool = False
    """Whether the stage reads the margin of a pair."""

    def __post_init__(self) -> None:
        known = (*FIELDS, *MESSAGE_KEYS)
        for name in self.columns:
            if name not in known:
                raise ConfigError(f"data.columns.{name}: is not a field; use one of {', '.join(known)}.")
        for name, role in self.roles.items():
            if role not in (*ROLES, *SPELLINGS):
                raise ConfigError(f"data.roles.{name}: {role!r} is not one of {', '.join(ROLES)}.")
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise ConfigError(f"data.chat_template_kwargs.{name}: is set by the program; leave it out.")
