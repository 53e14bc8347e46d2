"""The messages and keys in docs/faq.md are those of the program."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text()
MESSAGES = re.findall(r"^```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
KEYS = "run|checkpoint|preflight|model|adapter|parallelism|optimizer|scheduler|stage|data"
LEAST = 25
"""Characters of a message that are the same whatever its values are."""


@cache
def templates() -> list[tuple[int, "re.Pattern[str]"]]:
    """Return every string of the program as a pattern with its number of fixed characters."""
    found = []
    for path in (path for folder in ("components", "runner") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            fixed = [part.value for part in parts if isinstance(part, ast.Constant)]
            texts = [text for text in fixed if isinstance(text, str)]
            if texts and sum(map(len, texts)) >= LEAST:
                pattern = "".join(
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts
                )
                found.append((sum(map(len, texts)), re.compile(pattern, re.DOTALL)))
    return found


def test_there_are_questions_and_messages() -> None:
    assert PAGE.count("\n## ") >= 15
    assert len(MESSAGES) >= 12


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_program(message: str) -> None:
    assert any(pattern.fullmatch(message) for _, pattern in templates())


@pytest.mark.parametrize("key", sorted(set(re.findall(rf"`((?:{KEYS})\.\w+)[=`]", PAGE))))
def test_a_key_exists(key: str) -> None:
    assert f"| `{key}` |" in (ROOT / "docs" / "configuration.md").read_text()


def test_other_words_are_not_found() -> None:
    changed = [message.replace("; ", ", so ").replace(": ", " - ") for message in MESSAGES]
    assert [text for text in changed if any(pattern.fullmatch(text) for _, pattern in templates())] == []
