"""Parsing and validation of JSON, which other programs may have written."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def parse_json(text: str) -> Any:
    """Return the value that the JSON ``text`` encodes.

    Raises:
        json.JSONDecodeError: if ``text`` is malformed, is nested too deeply for Python, has an integer with
            more digits than Python converts, or has an unpaired surrogate, which UTF-8 cannot encode.
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error
    except UnicodeEncodeError as error:
        raise json.JSONDecodeError("half of a surrogate pair", text, 0) from error
    except ValueError as error:  # Python limits the digits of an integer
        raise json.JSONDecodeError("an integer of too many digits", text, 0) from error
    return value


@functools.cache
def validator(kind: Any) -> "TypeAdapter[Any]":
    """Return pydantic's validator of values of the type ``kind``, which takes milliseconds to make."""
    from pydantic import TypeAdapter  # slow to import

    return TypeAdapter(kind)


def as_type(kind: type[T], value: object) -> T:
    """Validate ``value``, parsed from JSON, and return it as an instance of ``kind``.

    Unknown fields of a dataclass are ignored.

    Raises:
        ValueError: if a field is missing or has the wrong type. The message names the field.
    """
    from pydantic import ValidationError  # slow to import

    try:
        checked: T = validator(kind).validate_python(value)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from error
    return checked


def read_json(path: Path) -> Json:
    """Return the JSON object that a file contains.

    Raises:
        ConfigError: if the file cannot be read, is malformed or contains anything else. The message names the
            file and, if it is malformed, the line.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {one_line(error)}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: malformed JSON: {error.msg}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not {type(value).__name__}.")
    return value


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and the values of all leaves of ``node``."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def one_line(error: BaseException) -> str:
    """Return the error's text on one line, cut after 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."
