"""Read prompts with their answers from records: pairs, and single completions with or without a label."""

import math
from collections.abc import Mapping
from dataclasses import replace

from components.data.records.messages import (
    alpaca_answer,
    alpaca_prompt,
    checked,
    fail,
    read_message,
    read_string,
    read_template_kwargs,
    read_tools,
    read_turns,
    split_untrained,
    system_turn,
    with_default_system,
)
from components.data.records.options import RecordOptions
from components.data.records.samples import Message, PreferenceSample, Turns, UnpairedSample


def read_preference(given: Mapping[str, object], options: RecordOptions, origin: str) -> PreferenceSample:
    sample = _read_pair(given, options, origin)
    return replace(sample, margin=_margin(given, origin)) if options.ranked else sample


def _margin(record: Mapping[str, object], origin: str) -> float:
    value = record.get("margin")
    if value is None or value == "":
        return 0.0
    try:  # a csv file holds text
        margin = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        fail(origin, f"field 'margin' is {value!r}", "Write a number, or remove it for a margin of 0.")
    return margin


def _read_pair(given: Mapping[str, object], options: RecordOptions, origin: str) -> PreferenceSample:
    record = given
    if given.get("chosen") is None and given.get("chosen_messages") is not None:
        record = {**given, "chosen": given["chosen_messages"], "rejected": given.get("rejected_messages")}
    if _is_plain(record, ("chosen", "rejected"), options):
        return _read_plain_pair(record, options, origin)
    chosen, rejected = (_completion(record, key, origin) for key in ("chosen", "rejected"))
    prompt = _explicit_prompt(record, origin)
    if prompt is None or chosen[0]["role"] != "assistant":
        shared = _num_shared(chosen, rejected, origin)
        whole = _whole_prompt(prompt or [], chosen[:shared], origin)
        prompt = whole if prompt else _after_system(record, whole, origin)
        chosen, rejected = chosen[shared:], rejected[shared:]
    prompt = with_default_system(prompt, options)
    for answer in (chosen, rejected):
        _check_answer(prompt, answer, origin)
    prompt, _ = split_untrained(prompt)
    kwargs = read_template_kwargs(record, options, origin)
    return PreferenceSample(prompt, chosen, rejected, read_tools(record, origin), kwargs)


def _read_plain_pair(record: Mapping[str, object], options: RecordOptions, origin: str) -> PreferenceSample:
    _check_plain(record, options, origin)
    chosen, rejected = (read_string(record, key, origin, may_be_empty=True) for key in ("chosen", "rejected"))
    if record.get("prompt") is not None:
        return PreferenceSample(read_string(record, "prompt", origin), chosen, rejected, None)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if chosen[:shared].endswith(" "):  # as in TRL: a space before the answers belongs to them
        shared -= 1
    if shared in (0, len(chosen), len(rejected)):
        what = "share no prompt" if shared == 0 else "do not differ in an answer"
        fail(origin, f"'chosen' and 'rejected' {what}", "Add a 'prompt', or give both whole texts.")
    return PreferenceSample(chosen[:shared], chosen[shared:], rejected[shared:], None)


def _is_plain(record: Mapping[str, object], answers: tuple[str, ...], options: RecordOptions) -> bool:
    """Return whether the prompt, if there is one, and all answers are text that no template renders."""
    others = (record.get(key) for key in ("instruction", "messages", "conversations"))
    return (
        options.strings == "plain"
        and all(isinstance(record.get(key), str) for key in answers)
        and isinstance(record.get("prompt"), str | None)
        and all(value is None for value in others)
    )


def _check_plain(record: Mapping[str, object], options: RecordOptions, origin: str) -> None:
    chats = {
        "system prompt": record.get("system") or options.default_system,
        "tools": record.get("tools"),
        "chat_template_kwargs": record.get("chat_template_kwargs") or options.chat_template_kwargs,
    }
    for what, value in chats.items():
        if value:
            text = f"its prompt and answers are strings, which take no {what}"
            fail(origin, text, "Set data.strings=chat to make turns of them, or remove it.")


def read_completion(record: Mapping[str, object], options: RecordOptions, origin: str) -> tuple[Turns, Turns]:
    """Return the prompt and the completion: two strings, or two lists of messages.

    Raises:
        RecordError: if one of them is missing or invalid.
    """
    if _is_plain(record, ("completion",), options):
        _check_plain(record, options, origin)
        if record.get("prompt") is None:
            fail(origin, "has no prompt", "Add a field 'prompt'.")
        completion = read_string(record, "completion", origin, may_be_empty=True)
        return read_string(record, "prompt", origin), completion
    prompt = _explicit_prompt(record, origin)
    if not prompt:
        fail(origin, "has no prompt", "Add a field 'prompt'.")
    return prompt, _completion(record, "completion", origin)


def read_unpaired(record: Mapping[str, object], options: RecordOptions, origin: str) -> UnpairedSample:
    """Read a completion that is labelled desirable or not, and its prompt.

    The completion is the field ``completion``, the last turn of a conversation, or the answer of an alpaca
    record.

    Raises:
        RecordError: if the label, the prompt or the completion is missing or invalid.
    """
    desirable = _label(record, origin)
    if record.get("completion") is not None:
        prompt, completion = read_completion(record, options, origin)
    else:
        prompt, completion = _last_turn(record, origin)
    if isinstance(prompt, str):
        return UnpairedSample(prompt, completion, desirable, None, kl_completion=completion)
    assert isinstance(completion, list)
    prompt = with_default_system(prompt, options)
    _check_answer(prompt, completion, origin)
    prompt, _ = split_untrained(prompt)
    kwargs = read_template_kwargs(record, options, origin)
    return UnpairedSample(prompt, completion, desirable, read_tools(record, origin), completion, kwargs)


_LABELS = {"true": True, "1": True, "false": False, "0": False}


def _label(record: Mapping[str, object], origin: str) -> bool:
    key = "kto_tag" if record.get("label") in (None, "") and "kto_tag" in record else "label"
    value = record.get(key)
    remedy = "Write true for a completion to follow, false for one to avoid."
    if value is None:
        fail(origin, f"field {key!r} is {'null' if key in record else 'missing'}", remedy)
    if isinstance(value, str):  # of a csv file
        value = _LABELS.get(value.lower(), value)
    if value not in (0, 1):  # includes True and False
        fail(origin, f"field {key!r} is {value!r}", remedy)
    return bool(value)


def _last_turn(record: Mapping[str, object], origin: str) -> tuple[list[Message], list[Message]]:
    if record.get("output") is not None or record.get("response") is not None:
        return alpaca_prompt(record, origin), [alpaca_answer(record, origin)]
    key = next((key for key in ("messages", "conversations") if record.get(key) is not None), None)
    if key is None:
        fail(origin, "field 'completion' is missing", f"Fields seen: {', '.join(map(str, record))}.")
    turns = checked(read_turns(record, key, origin), origin)
    return turns[:-1], turns[-1:]


def _check_answer(prompt: list[Message], answer: list[Message], origin: str) -> None:
    if not prompt:
        fail(origin, "has no prompt", "Add a field 'prompt'.")
    if len(checked([*prompt, *answer], origin)) < len(prompt) + len(answer):
        fail(origin, f"an answer ends with a {answer[-1]['role']} turn", "End it with the assistant's.")
    _, excluded = split_untrained(answer)
    if excluded:
        fail(origin, "a turn of an answer is excluded from training", "Remove its flag.")
    if answer[0]["role"] != "assistant":
        fail(origin, f"an answer begins with a {answer[0]['role']} turn", "Begin it with the assistant's.")


def _completion(record: Mapping[str, object], key: str, origin: str) -> list[Message]:
    """Return the answer under ``key`` as messages.

    The field is a string, a message, or a list of messages with or without the prompt.
    """
    value = record.get(key)
    if value == []:
        fail(origin, f"field {key!r} is empty", "Fill it in, or remove the record.")
    if isinstance(value, list):
        return [read_message(turn, f"{key}[{i}]", origin) for i, turn in enumerate(value)]
    if isinstance(value, dict):
        return [read_message(value, key, origin)]
    return [{"role": "assistant", "content": read_string(record, key, origin, may_be_empty=True)}]


def _explicit_prompt(record: Mapping[str, object], origin: str) -> list[Message] | None:
    if isinstance(record.get("prompt"), str):
        question = {"role": "user", "content": read_string(record, "prompt", origin)}
        return [*system_turn(record, origin), question]
    for key in ("prompt", "conversations", "messages"):
        if record.get(key) is not None:
            return read_turns(record, key, origin)
    return alpaca_prompt(record, origin) if record.get("instruction") is not None else None


def _num_shared(chosen: list[Message], rejected: list[Message], origin: str) -> int:
    """Return the number of leading messages that two whole conversations have in common.

    Raises:
        RecordError: if they share no message, or one of them has no answer of its own.
    """
    pairs = zip(chosen, rejected, strict=False)
    if chosen == rejected and len(chosen) > 1:
        return len(chosen) - 1  # identical answers are counted after truncation, which can make more of them
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if shared in (0, len(chosen), len(rejected)):
        what = "share no leading message" if shared == 0 else "do not differ in an answer"
        fail(origin, f"'chosen' and 'rejected' {what}", "Add a 'prompt', or give both whole conversations.")
    return shared


def _after_system(record: Mapping[str, object], prompt: list[Message], origin: str) -> list[Message]:
    """Return ``prompt``, after the turn of the record's field ``system`` unless it has a system turn."""
    return prompt if prompt[0]["role"] == "system" else [*system_turn(record, origin), *prompt]


def _whole_prompt(explicit: list[Message], shared: list[Message], origin: str) -> list[Message]:
    """Return the longer of the record's explicit prompt and the messages that both answers begin with.

    Raises:
        RecordError: if the longer one does not end with the shorter one.
    """
    short, long = sorted((explicit, shared), key=len)
    if long[len(long) - len(short) :] != short:
        what = "'prompt' is not the prompt that 'chosen' and 'rejected' begin with"
        fail(origin, what, "Remove one of them.")
    return long
