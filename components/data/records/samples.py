"""The four kinds of sample, whatever the format of the records.

A message has the form that transformers' chat templates take: ``{"role", "content"}`` and, if the assistant
calls functions, ``"tool_calls"``.
"""

from dataclasses import dataclass

from components.contracts.json_types import Json

Tool = Json
"""The JSON schema of a function that a model may call."""

Message = Json


@dataclass(frozen=True)
class TextSample:
    """A document."""

    text: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation that ends with the assistant."""

    messages: list[Message]
    tools: list[Tool] | None


@dataclass(frozen=True)
class PreferenceSample:
    """Two continuations of one prompt. Both begin and end with an assistant turn."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Tool] | None


@dataclass(frozen=True)
class UnpairedSample:
    """A continuation of a prompt, desirable or not. It begins and ends with an assistant turn."""

    prompt: list[Message]
    completion: list[Message]
    desirable: bool
    tools: list[Tool] | None
    kl_completion: list[Message]
    """The completion of another prompt."""


Sample = TextSample | ChatSample | PreferenceSample | UnpairedSample
