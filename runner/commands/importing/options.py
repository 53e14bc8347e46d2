"""The options whose translation is a row of other_tools.yaml."""

from runner.commands.importing.translation import Translation, as_list, is_off
from runner.config.unknown_keys import Counterpart

OFF = "(off)"
LISTS = ("adapter.target_modules", "adapter.modules_to_save", "model.add_tokens")
COMBINED = ("stage.loss", "stage.loss_weights")
"""Keys whose value may be a list with several entries."""


def translate_option(work: Translation, name: str) -> None:
    """Translate the option ``name`` by its row in other_tools.yaml, and remove it from ``work.left``.

    If the option is not needed here or has no equivalent, ``work`` records the reason instead.
    """
    value = work.left.pop(name)
    needless, lacking = (work.reason(kind, name, exact=True) for kind in ("not_needed", "no_equivalent"))
    row = None if needless or lacking else work.row(name)
    if row is not None:
        key, _, switched = row.here.partition("=")
        ours = ours_of(row, key, switched, value)
        if ours is None:
            work.lacks(name, f"use {row.here}{f' ({row.remark})' if row.remark else ''}")
        elif ours != OFF:
            work.words[key] = ours
        elif name in work.given:
            work.needless[name] = f"it is the default without {row.here}" if switched else "it is the default"
    elif needless := needless or (None if lacking else work.reason("not_needed", name, exact=False)):
        work.needless[name] = needless
    else:
        work.lacks(name, lacking or str(work.reason("no_equivalent", name, exact=False)))


def ours_of(row: Counterpart, key: str, switched: str, value: object) -> object:
    """Return the value of our ``key`` that is equivalent to ``value`` of the other tool's option.

    None means that ``value`` cannot be converted, OFF that the key need not be set. ``switched`` is our value
    if ``row`` has KEY=VALUE, else "".
    """
    values = as_list(value)
    if key in LISTS and not switched:
        words = [part.strip() for part in value.split(",")] if isinstance(value, str) else values
        known = {"all-linear": "all-linear", **(row.values or {})}
        return known.get(words[0], words) if len(words) == 1 else words
    if row.values is not None:
        theirs = str(values[0]).lower() if len(values) == 1 else ""
        return None if theirs not in row.values else OFF if (ours := row.values[theirs]) is None else ours
    if switched:
        return OFF if is_off(value) else switched
    if key in COMBINED and len(values) > 1:
        return values
    return values[0] if len(values) == 1 and not isinstance(values[0], dict) else None
