"""Read messages from a record, in which keys and roles may have any of their usual names.

Every error message names the record's origin.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from components.contracts.json_types import Json
from components.data.records.options import RESERVED, ROLES, SPELLINGS, RecordError, RecordOptions
from components.data.records.samples import Message, Tool
from components.json_text import parse_json

REASONING_KEYS = ("reasoning_content", "thinking")
_KEPT_KEYS = ("name", "tool_call_id", *REASONING_KEYS)  # some templates read them
_FLAGS = ("weight", "train", "training", "loss_weight", "loss")
"""Keys of a turn, 0 or 1, of OpenAI, axolotl (two), LLaMA-Factory and ms-swift."""
_CALL_KEYS = ("name", "id", "type", "description")
_UNTRAINED = "untrained"
"""Key that marks a message that its record excludes from training. ``split_untrained`` removes the key."""


def fail(origin: str, what: str, remedy: str) -> NoReturn:
    raise RecordError(f"{origin}: {what}. {remedy}")


def read_string(
    record: Mapping[str, object], key: str, origin: str, *, optional: bool = False, may_be_empty: bool = False
) -> str:
    value = record.get(key)
    if value is None and optional:
        return ""
    if value is None:
        fail(origin, f"field {key!r} is missing", f"Fields seen: {', '.join(map(str, record))}.")
    if not isinstance(value, str):
        fail(origin, f"field {key!r} is of type {type(value).__name__}", "Make it a string.")
    if not optional and not may_be_empty and not value.strip():
        fail(origin, f"field {key!r} is empty", "Fill it in, or remove the record.")
    return value


def _json(text: str, key: str, origin: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        fail(origin, f"{key!r} is not valid JSON ({error})", "Write it as a JSON string.")


# Prompts


def alpaca_prompt(record: Mapping[str, object], origin: str) -> list[Message]:
    names = [_present(record, "instruction", "prompt"), _present(record, "input", "query")]
    parts = [read_string(record, name, origin, optional=True) for name in names]
    if not any(part.strip() for part in parts):
        read_string(record, names[0], origin)  # raises
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(map(_is_exchange, pairs)):
        fail(origin, "field 'history' is not a list of [question, answer]", "Write it so, or remove it.")
    messages = system_turn(record, origin)
    for asked, answered in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _is_exchange(pair: object) -> bool:
    return isinstance(pair, list) and [type(text) for text in pair] == [str, str]


def alpaca_answer(record: Mapping[str, object], origin: str) -> Message:
    """Return the answer of an alpaca record as a message, whose content may be empty."""
    key = _present(record, "output", "response")
    return {"role": "assistant", "content": read_string(record, key, origin, may_be_empty=True)}


def _present(record: Mapping[str, object], name: str, other: str) -> str:
    """Return ``other`` if only that field is present, else ``name``."""
    return other if record.get(name) is None and record.get(other) is not None else name


def system_turn(record: Mapping[str, object], origin: str) -> list[Message]:
    text = read_string(record, "system", origin, optional=True)
    return [{"role": "system", "content": text}] if text else []


def with_default_system(messages: list[Message], options: RecordOptions) -> list[Message]:
    """Return the messages, after ``data.default_system`` if they do not begin with a system turn."""
    if not options.default_system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": options.default_system}, *messages]


def read_turns(record: Mapping[str, object], key: str, origin: str) -> list[Message]:
    """Return the messages under ``key``, after the turn of the record's field ``system`` if it has one.

    If the messages begin with a system turn, this turn has precedence, as in LLaMA-Factory.

    Raises:
        RecordError: if the field is not a list of messages, or a message is invalid.
    """
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else "not a list of messages" if turns else "empty"
        fail(origin, f"field {key!r} is {seen}", "Give it a list of messages.")
    messages = [read_message(turn, f"{key}[{i}]", origin) for i, turn in enumerate(turns)]
    return messages if begins_with_system(turns) else [*system_turn(record, origin), *messages]


def begins_with_system(turns: object) -> bool:
    """Return whether ``turns``, a field of a record, is a list of messages that begins with a system turn."""
    return isinstance(turns, list) and bool(turns) and _role(turns[0]) == "system"


def ends_without_an_answer(turns: object) -> bool:
    """Return whether ``turns``, a field of a record, is a list of messages whose last is not an answer."""
    return isinstance(turns, list) and bool(turns) and _role(turns[-1]) not in (None, "assistant")


def _role(raw: object) -> str | None:
    """Return the role of a message of a record, in the spelling of chat templates.

    A role that is not in ``SPELLINGS`` is returned unchanged. None means that the message has no role.
    """
    name = (raw.get("role") or raw.get("from")) if isinstance(raw, dict) else None
    return SPELLINGS.get(name, name) if isinstance(name, str) else None


# Messages, with the keys of sharegpt (from, value) or OpenAI (role, content)


def read_message(raw: object, where: str, origin: str) -> Message:
    if not isinstance(raw, dict):
        what = f"{where} is of type {type(raw).__name__}"
        fail(origin, what, "Write {'role', 'content'} or {'from', 'value'}.")
    name, role = raw.get("role") or raw.get("from"), _role(raw)
    if role not in ROLES:
        known = ", ".join([*ROLES, *SPELLINGS])
        named = "name the role in data.roles" if name else "name its key in data.columns.role"
        remedy = f"Use 'role' or 'from' with one of: {known}; or {named}."
        fail(origin, f"{where} has the role {name!r}", remedy)
    content = raw.get(_present(raw, "content", "value"))
    if content is None and role != "assistant":
        remedy = "Fill it in, or give the name of its key in data.columns.content."
        fail(origin, f"{where}, a {role} turn, has no content", remedy)
    message: Message = {"role": role} | _content(content, where, origin)
    if name == "function_call":
        called = _calls(_json(message["content"], where, origin), where, origin)
        message |= {"content": "", "tool_calls": called}
    message |= {key: raw[key] for key in _KEPT_KEYS if raw.get(key)}
    if raw.get("tool_calls"):
        message["tool_calls"] = _calls(raw["tool_calls"], where, origin)
    if not _is_trained(raw, role, where, origin):
        message[_UNTRAINED] = True
    return message


def _is_trained(raw: Message, role: str, where: str, origin: str) -> bool:
    given = training_flags(raw)
    if not given:
        return True
    flag = given[0]
    if other := next((key for key in given if raw[key] != raw[flag]), None):
        fail(origin, f"{flag} and {other} of {where} contradict each other", "Remove one of them.")
    if raw[flag] not in (0, 1):  # includes True and False
        fail(origin, f"{flag} of {where} is {raw[flag]!r}", "Use 0 or 1: a turn is trained on, or not.")
    if raw[flag] and role != "assistant":
        fail(origin, f"{flag} of {where} is {raw[flag]!r}, a {role} turn", "Set it to 0 or remove it.")
    return bool(raw[flag])


def training_flags(raw: Mapping[str, object]) -> list[str]:
    """Return the keys of a message, or of a part of one, that say whether it is trained on.

    A number in ``loss`` other than 0 and 1 is a measured loss, not a flag.
    """
    given = [key for key in _FLAGS if raw.get(key) is not None]
    loss = raw.get("loss")
    is_measured = isinstance(loss, int | float) and loss not in (0, 1)
    return [key for key in given if not (key == "loss" and is_measured)]


def split_untrained(messages: list[Message]) -> tuple[list[Message], frozenset[int]]:
    """Return the messages in the form for chat templates, and the positions of those not trained on."""
    excluded = frozenset(i for i, message in enumerate(messages) if _UNTRAINED in message)
    plain = [{key: message[key] for key in message if key != _UNTRAINED} for message in messages]
    return (plain if excluded else messages), excluded


def _content(value: object, where: str, origin: str) -> Message:
    """Return a message without a role: the content, and the reasoning and tool calls if it has such parts.

    The text of a part is under ``text`` (OpenAI) or ``value`` (LLaMA-Factory). The value None, as in a turn
    with only tool calls, becomes "".
    """
    if isinstance(value, list):
        return _parts(value, where, origin)
    if value is not None and not isinstance(value, str):
        fail(origin, f"the content of {where} is of type {type(value).__name__}", "Make it a string.")
    return {"content": value or ""}


def _parts(parts: list[object], where: str, origin: str) -> Message:
    found: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        text = part.get(_present(part, "text", "value")) if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in found or not isinstance(text, str):
            if isinstance(kind, str) and kind not in found:
                remedy = f"Remove it, or set data.ignore_fields=[{kind}] to train without it."
                fail(origin, f"{where} has a part of type {kind!r}, and only text can be trained on", remedy)
            fail(origin, f"{where} has a part that is not text", "Only text can be trained on; remove it.")
        assert isinstance(part, dict)
        if training_flags(part):
            fail(origin, f"{where} marks a part of its content", "Set 'train' or 'weight' on the whole turn.")
        found[kind].append(text)
    message: Message = {"content": "".join(found["text"])}
    if found["reasoning"]:
        message["reasoning_content"] = "".join(found["reasoning"])
    if found["tool_call"]:
        calls = [_json(text, where, origin) for text in found["tool_call"]]
        message["tool_calls"] = _calls(calls, where, origin)
    return message


def has_reasoning_part(raw: Mapping[str, object]) -> bool:
    """Return whether the content of a message, as it is in a record, has a part with reasoning."""
    contents = (raw.get("content"), raw.get("value"))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(
        isinstance(part, dict) and part.get("type") == "reasoning" and (part.get("text") or part.get("value"))
        for part in parts
    )


def _calls(raw: Any, where: str, origin: str) -> list[Tool]:
    """Return OpenAI tool calls, given one call or a list of them.

    A call is ``{name, arguments}``, or an object with that under ``function``. Llama 3 calls the arguments
    ``parameters``. A call without arguments may only have a name, an id, a type and a description, because
    another field may be its arguments.
    """
    calls = []
    for call in raw if isinstance(raw, list) else [raw]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            fail(origin, f"{where} calls no named function", 'Write {"name": ..., "arguments": {...}}.')
        given = {key: value for key, value in function.items() if value is not None}
        arguments = given.get("arguments", given.get("parameters"))
        if arguments is None and (other := next((key for key in given if key not in _CALL_KEYS), None)):
            remedy = "Rename it to 'arguments' if it has the arguments, or remove it."
            fail(origin, f"a call in {where} has a field {other!r} and no 'arguments'", remedy)
        arguments = arguments or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"arguments of {where}", origin)
        if not isinstance(arguments, dict):
            fail(origin, f"the arguments of a call in {where} are not an object", 'Write {"NAME": VALUE}.')
        kept = {"id": call["id"]} if call.get("id") else {}
        calls.append(
            {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def read_tools(record: Mapping[str, object], origin: str) -> list[Tool] | None:
    """Return the field ``tools`` of a record as a list of ``{"type": "function", "function": {...}}``.

    The field is a list of such objects or of their bare ``function`` objects, or that list as JSON text. None
    means that the record has no tools.

    Raises:
        RecordError: if the field is anything else.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools", origin) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fail(origin, "field 'tools' is not a list of function definitions", "Write a list of objects.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def read_template_kwargs(record: Mapping[str, object], options: RecordOptions, origin: str) -> Json:
    """Return the chat template's variables: those of the record override ``data.chat_template_kwargs``.

    Raises:
        RecordError: if those of the record are not an object, or if they contain one of ``RESERVED``.
    """
    own = record.get("chat_template_kwargs") or {}
    if not isinstance(own, dict) or any(name in RESERVED for name in own):
        remedy = f"Remove {', '.join(RESERVED)} from it."
        fail(origin, "field 'chat_template_kwargs' is not an object of variables", remedy)
    return {**options.chat_template_kwargs, **own}


def checked(messages: list[Message], origin: str) -> list[Message]:
    """Return the messages up to the last assistant turn.

    Any other rules for the order of turns are those of the chat template.

    Raises:
        RecordError: if an assistant turn comes first, a tool turn follows neither an assistant turn nor
            another tool turn, a content is not a string, or there is no assistant turn.
    """
    before = "start"
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        what = f"message {i} ({role})"
        if role == "tool" and before not in ("assistant", "tool"):
            fail(origin, f"{what} follows {before}", "A tool turn may follow assistant or tool.")
        if role == "assistant" and before == "start":
            fail(origin, f"{what} is the first", "Begin with a user turn.")
        if not isinstance(content, str):
            fail(origin, f"{what} is of type {type(content).__name__}", "Make it a string.")
        before = role
    end = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] == "assistant"), 0)
    if not end:
        fail(origin, "the conversation has no assistant turn", "Add an answer, or remove the record.")
    return messages[:end]
