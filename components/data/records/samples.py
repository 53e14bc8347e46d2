"""The kinds of sample, whatever the format of the records.

A message has the form that transformers' chat templates take: ``{"role", "content"}`` and, if the assistant
calls functions, ``"tool_calls"``. Prompts and answers are lists of messages, or strings that no chat template
renders.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from components.contracts.json_types import Json

Tool = Json
"""The JSON schema of a function that a model may call."""

Message = Json

Turns = str | list[Message]
"""Text that no chat template renders, or messages."""


@dataclass(frozen=True)
class TextSample:
    """A document."""

    text: str


@dataclass(frozen=True)
class CompletionSample:
    """A prompt and its completion, the part that is trained on."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class SegmentsSample:
    """Texts that are tokenised one by one, each with a flag that says whether it is trained on."""

    segments: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class ChatSample:
    """A conversation that ends with the assistant."""

    messages: list[Message]
    tools: list[Tool] | None
    untrained: frozenset[int] = frozenset()
    """Positions of assistant turns that are not trained on."""
    template_kwargs: Json = field(default_factory=dict)
    """Further variables of the chat template."""


@dataclass(frozen=True)
class PreferenceSample:
    """Two answers to one prompt. An answer of messages begins and ends with an assistant turn."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    tools: list[Tool] | None
    template_kwargs: Json = field(default_factory=dict)
    margin: float = 0.0
    """The margin by which the score of the chosen answer should exceed that of the rejected one."""

    @property
    def answers(self) -> tuple[Turns, Turns]:
        return self.chosen, self.rejected

    def unpaired(self, desirable: bool) -> "UnpairedSample":
        """Return the chosen answer as a desirable one, or the rejected one as an undesirable one."""
        answer = self.chosen if desirable else self.rejected
        return UnpairedSample(self.prompt, answer, desirable, self.tools, answer, self.template_kwargs)


@dataclass(frozen=True)
class UnpairedSample:
    """An answer to a prompt, labelled desirable or not.

    An answer of messages begins and ends with an assistant turn.
    """

    prompt: Turns
    completion: Turns
    desirable: bool
    tools: list[Tool] | None
    kl_completion: Turns
    """The completion of another record, for KTO's estimate of the KL divergence. It is the sample's own
    completion until the encoder replaces it."""
    template_kwargs: Json = field(default_factory=dict)

    @property
    def answers(self) -> tuple[Turns, Turns]:
        return self.completion, self.kl_completion


Sample = TextSample | CompletionSample | SegmentsSample | ChatSample | PreferenceSample | UnpairedSample


def is_empty(message: Message) -> bool:
    """Return whether a message has neither text nor tool calls."""
    return not message["content"].strip() and "tool_calls" not in message


def unusual_turns(sample: Sample) -> list[str]:
    """Return what is unusual in the turns of a sample, without a fault that makes its record a bad one."""
    chats = _conversations(sample)
    pairs = [pair for chat in chats for pair in pairwise(chat)]
    answers = [turn for chat in chats for turn in chat if turn["role"] == "assistant"]
    found = {
        "two user turns in a row": any(one["role"] == other["role"] == "user" for one, other in pairs),
        "system turn after the first turn": any(later["role"] == "system" for _, later in pairs),
        "empty answer": any(map(is_empty, answers)),
    }
    return [name for name, is_so in found.items() if is_so]


def _conversations(sample: Sample) -> list[list[Message]]:
    """Return a conversation for each answer of the sample, with strings as turns; none for other texts."""
    if isinstance(sample, TextSample | SegmentsSample):
        return []
    if isinstance(sample, ChatSample):
        return [sample.messages]
    answers = sample.answers if isinstance(sample, PreferenceSample) else (sample.completion,)
    return [[*_turns(sample.prompt, "user"), *_turns(answer, "assistant")] for answer in answers]


def _turns(turns: Turns, role: str) -> list[Message]:
    return [{"role": role, "content": turns}] if isinstance(turns, str) else turns
