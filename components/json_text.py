"""JSON of files that others may have written."""

import json
from typing import Any, TypeVar

T = TypeVar("T")


def parse_json(text: str) -> Any:
    """Return the value of ``text``.

    Raises:
        json.JSONDecodeError: if it is malformed, nested too deeply for Python, holds an integer of thousands
            of digits, or half of a surrogate pair, which no file can hold as UTF-8.
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


def as_type(kind: type[T], value: object) -> T:
    """Return ``value``, parsed from JSON, as the dataclass ``kind``; unknown fields are ignored.

    Raises:
        ValueError: naming the field, if one is missing or of another type.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from error
