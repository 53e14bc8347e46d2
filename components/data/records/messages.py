"""Read messages from a record, in the usual spellings. Every error message names the record's origin."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from components.contracts.errors import ConfigError
from components.data.records.samples import Message, Tool
from components.json_text import parse_json

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


def fail(origin: str, what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{origin}: {what}. {remedy}")


def read_string(record: Mapping[str, object], key: str, origin: str, *, optional: bool = False) -> str:
    value = record.get(key)
    if value is None and optional:
        return ""
    if value is None:
        fail(origin, f"field {key!r} is missing", f"Fields seen: {', '.join(map(str, record))}.")
    if not isinstance(value, str):
        fail(origin, f"field {key!r} is of type {type(value).__name__}", "Make it a string.")
    if not optional and not value.strip():
        fail(origin, f"field {key!r} is empty", "Fill it in, or remove the record.")
    return value


def _json(text: str, key: str, origin: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        fail(origin, f"{key!r} is not valid JSON ({error})", "Write it as a JSON string.")


# Prompts


def alpaca_prompt(record: Mapping[str, object], origin: str) -> list[Message]:
    question, extra = (
        read_string(record, "instruction", origin),
        read_string(record, "input", origin, optional=True),
    )
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        fail(origin, "field 'history' is not a list of [question, answer]", "Write it so, or remove it.")
    messages = system_turn(record, origin)
    for asked, answered in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": f"{question}\n{extra}" if extra else question}]


def system_turn(record: Mapping[str, object], origin: str) -> list[Message]:
    text = read_string(record, "system", origin, optional=True)
    return [{"role": "system", "content": text}] if text else []


def read_turns(record: Mapping[str, object], key: str, origin: str) -> list[Message]:
    """Return the messages under ``key``, after a system turn from the record's own ``system`` field."""
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else "not a list of messages" if turns else "empty"
        fail(origin, f"field {key!r} is {seen}", "Give it a list of messages.")
    return system_turn(record, origin) + [
        read_message(turn, f"{key}[{i}]", origin) for i, turn in enumerate(turns)
    ]


# Messages, in the spelling of sharegpt (from, value) or OpenAI (role, content)


def read_message(raw: object, where: str, origin: str) -> Message:
    if not isinstance(raw, dict):
        fail(
            origin,
            f"{where} is of type {type(raw).__name__}",
            "Write {'role', 'content'} or {'from', 'value'}.",
        )
    name = raw.get("role") or raw.get("from")
    role = _SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else None
    if role not in _FOLLOWS:
        known = ", ".join([*_FOLLOWS, *_SHAREGPT_ROLES])
        fail(origin, f"{where} has the role {name!r}", f"Use 'role' or 'from' with one of: {known}.")
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


def _content(value: object, where: str, origin: str) -> str:
    """Return a string, OpenAI's list of parts joined, or "" for None (a turn of tool calls only)."""
    if isinstance(value, list):
        texts = [
            part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(value):
            fail(origin, f"{where} has a part that is not text", "Only text can be trained on.")
        return "".join(texts)
    if value is not None and not isinstance(value, str):
        fail(origin, f"the content of {where} is of type {type(value).__name__}", "Make it a string.")
    return value or ""


def _calls(raw: Any, where: str, origin: str) -> list[Tool]:
    """Return one call or several, bare ``{name, arguments}`` or wrapped, with arguments as an object."""
    calls = []
    for call in raw if isinstance(raw, list) else [raw]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            fail(origin, f"{where} calls no named function", 'Write {"name": ..., "arguments": {...}}.')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"arguments of {where}", origin)
        kept = {"id": call["id"]} if call.get("id") else {}
        calls.append(
            {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def read_tools(record: Mapping[str, object], origin: str) -> list[Tool] | None:
    """Return the function definitions of a list or JSON string, as ``{"type": "function", "function"}``."""
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools", origin) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fail(origin, "field 'tools' is not a list of function definitions", "Write a list of objects.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def checked(messages: list[Message], origin: str) -> list[Message]:
    """Return the messages, or raise ConfigError if their roles are out of order or a text is missing."""
    before = "start"
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        what = f"message {i} ({role})"
        if before not in _FOLLOWS[role]:
            fail(
                origin, f"{what} follows {before}", f"A {role} turn may follow {' or '.join(_FOLLOWS[role])}."
            )
        if not isinstance(content, str):
            fail(origin, f"{what} is of type {type(content).__name__}", "Make it a string.")
        if role in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
            fail(origin, f"{what} is empty", "Fill it in, or remove the record.")
        before = role
    if before != "assistant":
        fail(origin, f"the conversation ends with a {before} turn", "End it with an assistant turn.")
    return messages
