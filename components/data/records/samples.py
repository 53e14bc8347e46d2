"""Four kinds of sample, whatever the records looked like.

A message is what transformers' chat templates take: ``{"role", "content"}`` and, for an assistant that
calls functions, ``"tool_calls"``.
"""

from dataclasses import dataclass
from typing import Any

Tool = dict[str, Any]
"""The JSON schema of a function that a model may call."""

Message = dict[str, Any]


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
    """Two ways on from one prompt; both begin and end with the assistant."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Tool] | None


@dataclass(frozen=True)
class UnpairedSample:
    """A way on from a prompt, and whether it is one to follow; it begins and ends with the assistant."""

    prompt: list[Message]
    completion: list[Message]
    desirable: bool
    tools: list[Tool] | None
    kl_completion: list[Message]
    """The completion of another prompt."""


Sample = TextSample | ChatSample | PreferenceSample | UnpairedSample
