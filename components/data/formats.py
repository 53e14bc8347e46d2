"""Records as users have them, brought to three kinds of sample.

A message is what transformers' chat templates take: ``{"role", "content"}`` and, for an assistant that
calls functions, ``"tool_calls"``. Every mistake names the record's origin.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from runner.errors import ConfigError
from runner.protocols import SampleKind

Format = Literal["text", "alpaca", "sharegpt", "messages", "preference"]
Message = dict[str, Any]

KINDS: Mapping[Format, SampleKind] = {
    "text": "text",
    "alpaca": "chat",
    "sharegpt": "chat",
    "messages": "chat",
    "preference": "preference",
}
"""The kind of sample a format holds."""

# The keys a format is recognised by; the first that are all there decide.
_MARKS: Mapping[Format, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "developer": "system",
    "function": "tool",
}
_KEPT_KEYS = ("name", "tool_call_id", "reasoning_content")  # some templates read them
_FOLLOWS = {
    "system": ("start",),
    "user": ("start", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass(frozen=True)
class TextSample:
    """A document."""

    text: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation that ends with the assistant."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class PreferenceSample:
    """Two ways on from one prompt; both begin and end with the assistant."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None


Sample = TextSample | ChatSample | PreferenceSample


def detect(record: Mapping[str, Any], origin: str) -> Format:
    """Names the format by the fields that are there. ConfigError: none of the known ones."""
    for name, keys in _MARKS.items():
        if all(record.get(key) is not None for key in keys):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _MARKS.items())
    raise ConfigError(
        f"{origin}: data.format=auto does not recognise a record with fields {', '.join(map(str, record))}.\n"
        f"Rename the fields to one of ({known}), or name the format in data.format."
    )


def normalize(record: Mapping[str, Any], format: Format, origin: str) -> Sample:
    """Turns one record into a sample. ConfigError: a missing field, a wrong type, roles out of order."""
    assert format in get_args(Format), format
    if format == "text":
        return TextSample(_string(record, "text", origin))
    if format == "preference":
        return _preference(record, origin)
    if format == "alpaca":
        answer = {"role": "assistant", "content": _string(record, "output", origin)}
        return ChatSample(_checked([*_alpaca_prompt(record, origin), answer], origin), _tools(record, origin))
    turns = _turns(record, _MARKS[format][0], origin)
    return ChatSample(_checked(turns, origin), _tools(record, origin))


def _fail(origin: str, what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{origin}: {what}. {remedy}")


def _string(record: Mapping[str, Any], key: str, origin: str, *, optional: bool = False) -> str:
    value = record.get(key)
    if value is None and optional:
        return ""
    if value is None:
        _fail(origin, f"field {key!r} is missing", f"Fields seen: {', '.join(map(str, record))}.")
    if not isinstance(value, str):
        _fail(origin, f"field {key!r} is of type {type(value).__name__}", "Make it a string.")
    if not optional and not value.strip():
        _fail(origin, f"field {key!r} is empty", "Fill it in, or remove the record.")
    return value


def _json(text: str, key: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        _fail(origin, f"{key!r} is not valid JSON ({error})", "Write it as a JSON string.")


# Prompts


def _alpaca_prompt(record: Mapping[str, Any], origin: str) -> list[Message]:
    question, extra = _string(record, "instruction", origin), _string(record, "input", origin, optional=True)
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        _fail(origin, "field 'history' is not a list of [question, answer]", "Write it so, or remove it.")
    messages = _system(record, origin)
    for asked, answered in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": f"{question}\n{extra}" if extra else question}]


def _system(record: Mapping[str, Any], origin: str) -> list[Message]:
    text = _string(record, "system", origin, optional=True)
    return [{"role": "system", "content": text}] if text else []


def _turns(record: Mapping[str, Any], key: str, origin: str) -> list[Message]:
    """The list of messages under ``key``, after a system turn from the record's own ``system``."""
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else "not a list of messages" if turns else "empty"
        _fail(origin, f"field {key!r} is {seen}", "Give it a list of messages.")
    return _system(record, origin) + [_message(turn, f"{key}[{i}]", origin) for i, turn in enumerate(turns)]


# Messages, in the spelling of sharegpt (from, value) or OpenAI (role, content)


def _message(raw: Any, where: str, origin: str) -> Message:
    if not isinstance(raw, dict):
        _fail(
            origin,
            f"{where} is of type {type(raw).__name__}",
            "Write {'role', 'content'} or {'from', 'value'}.",
        )
    name = raw.get("role") or raw.get("from")
    role = _SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else None
    if role not in _FOLLOWS:
        known = ", ".join([*_FOLLOWS, *_SHAREGPT_ROLES])
        _fail(origin, f"{where} has the role {name!r}", f"Use 'role' or 'from' with one of: {known}.")
    content = _content(raw.get("value") if raw.get("content") is None else raw["content"], where, origin)
    if name == "function_call":
        return {
            "role": role,
            "content": "",
            "tool_calls": _calls(_json(content, where, origin), where, origin),
        }
    message = {"role": role, "content": content} | {key: raw[key] for key in _KEPT_KEYS if raw.get(key)}
    if raw.get("tool_calls"):
        message["tool_calls"] = _calls(raw["tool_calls"], where, origin)
    return message


def _content(value: Any, where: str, origin: str) -> str:
    """A string, or the joined text of OpenAI's list of parts; None is empty (a turn of tool calls only)."""
    if isinstance(value, list):
        texts = [
            part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(value):
            _fail(origin, f"{where} has a part that is not text", "Only text can be trained on.")
        return "".join(texts)
    if value is not None and not isinstance(value, str):
        _fail(origin, f"the content of {where} is of type {type(value).__name__}", "Make it a string.")
    return value or ""


def _calls(raw: Any, where: str, origin: str) -> list[dict[str, Any]]:
    """One call or several, bare ``{name, arguments}`` or wrapped; arguments end up as an object."""
    calls = []
    for call in raw if isinstance(raw, list) else [raw]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _fail(origin, f"{where} calls no named function", 'Write {"name": ..., "arguments": {...}}.')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"arguments of {where}", origin)
        kept = {"id": call["id"]} if call.get("id") else {}
        calls.append(
            {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def _tools(record: Mapping[str, Any], origin: str) -> list[dict[str, Any]] | None:
    """Function definitions from a list or a JSON string, each as ``{"type": "function", "function"}``."""
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools", origin) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _fail(origin, "field 'tools' is not a list of function definitions", "Write a list of objects.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _checked(messages: list[Message], origin: str) -> list[Message]:
    """The messages, once their order and their texts are as a conversation's should be."""
    before = "start"
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        what = f"message {i} ({role})"
        if before not in _FOLLOWS[role]:
            _fail(
                origin, f"{what} follows {before}", f"A {role} turn may follow {' or '.join(_FOLLOWS[role])}."
            )
        if not isinstance(content, str):
            _fail(origin, f"{what} is of type {type(content).__name__}", "Make it a string.")
        if role in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
            _fail(origin, f"{what} is empty", "Fill it in, or remove the record.")
        before = role
    if before != "assistant":
        _fail(origin, f"the conversation ends with a {before} turn", "End it with an assistant turn.")
    return messages


# Pairs


def _preference(record: Mapping[str, Any], origin: str) -> PreferenceSample:
    chosen, rejected = (_completion(record, key, origin) for key in ("chosen", "rejected"))
    prompt = _explicit_prompt(record, origin)
    if prompt is None or chosen[0]["role"] != "assistant":
        shared = _num_shared(chosen, rejected, origin)
        prompt = _whole_prompt(prompt or [], chosen[:shared], origin)
        chosen, rejected = chosen[shared:], rejected[shared:]
    for turns in (chosen, rejected):
        _checked([*prompt, *turns], origin)
        if turns[0]["role"] != "assistant":
            _fail(
                origin, f"an answer begins with a {turns[0]['role']} turn", "Begin it with the assistant's."
            )
    if chosen == rejected:
        _fail(origin, "'chosen' and 'rejected' are the same", "Remove the record.")
    return PreferenceSample(prompt, chosen, rejected, _tools(record, origin))


def _completion(record: Mapping[str, Any], key: str, origin: str) -> list[Message]:
    """An answer as a string, one message, or a list of messages (with the prompt or without)."""
    value = record.get(key)
    if isinstance(value, list) and value:
        return [_message(turn, f"{key}[{i}]", origin) for i, turn in enumerate(value)]
    if isinstance(value, dict):
        return [_message(value, key, origin)]
    return [{"role": "assistant", "content": _string(record, key, origin)}]


def _explicit_prompt(record: Mapping[str, Any], origin: str) -> list[Message] | None:
    if isinstance(record.get("prompt"), str):
        question = {"role": "user", "content": _string(record, "prompt", origin)}
        return [*_system(record, origin), question]
    for key in ("prompt", "conversations", "messages"):
        if record.get(key) is not None:
            return _turns(record, key, origin)
    return _alpaca_prompt(record, origin) if record.get("instruction") is not None else None


def _num_shared(chosen: list[Message], rejected: list[Message], origin: str) -> int:
    """How many leading messages two whole conversations have in common."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if shared in (0, len(chosen), len(rejected)):
        what = "share no leading message" if shared == 0 else "do not differ in an answer"
        _fail(origin, f"'chosen' and 'rejected' {what}", "Add a 'prompt', or give both whole conversations.")
    return shared


def _whole_prompt(explicit: list[Message], shared: list[Message], origin: str) -> list[Message]:
    """The longer of a record's own prompt and the one its answers repeat; one must end with the other."""
    short, long = sorted((explicit, shared), key=len)
    if long[len(long) - len(short) :] != short:
        _fail(
            origin,
            "'prompt' is not the prompt that 'chosen' and 'rejected' begin with",
            "Remove one of them.",
        )
    return long
