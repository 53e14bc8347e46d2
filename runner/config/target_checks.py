"""Checks of the class or function that ``_target_`` names, before it is called."""

import inspect
import typing
from collections.abc import Mapping

from typing_extensions import get_protocol_members, is_protocol

from components.contracts.configs import AdapterConfig, NoAdapter


def objection(target: object, contract: type) -> str | None:
    """Return why ``target`` does not make an object that implements ``contract``, or None if it does.

    ``target`` must be a class, or a function whose result is annotated with a class.
    """
    if inspect.isclass(target):
        if is_protocol(target) or inspect.isabstract(target):
            return "is an interface, without an implementation"
        return lacking(target, contract)
    if inspect.isfunction(target) or inspect.ismethod(target):
        return objection_to_result(typing.get_type_hints(target, include_extras=True), contract)
    return "is not a class"


def objection_to_result(hints: Mapping[str, object], contract: type) -> str | None:
    """Return why the result of a function with the annotations ``hints`` does not implement ``contract``.

    None means that it does.
    """
    if "return" not in hints:
        return "is not a class, nor a function with the annotation of its result"
    result = hints["return"]
    if result == NoAdapter and contract is AdapterConfig:
        return None
    reason = lacking(result, contract) if inspect.isclass(result) else "is not a class"
    return reason and f"returns {getattr(result, '__name__', result)}, which {reason}"


def lacking(kind: type, contract: type) -> str | None:
    """Name what ``kind`` lacks: members of the protocol ``contract``, or ``contract`` as its base class.

    None means that it lacks nothing. Attributes that ``__init__`` sets and the class does not declare count
    as missing, because they do not exist before the class is called.
    """
    if not is_protocol(contract):
        return None if issubclass(kind, contract) else f"is not a {contract.__name__}"
    has = {name for base in kind.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    lacks = sorted(get_protocol_members(contract) - has)
    return f"lacks {', '.join(lacks[:3])}{' ...' if lacks[3:] else ''}" if lacks else None
