"""Docstrings, comments and guides are in plain standard English: see "Language" in CONTRIBUTING.md.

The number of findings in each file:
``python -c "from tests.unit.test_language import *; print(*counts().items(), sep=chr(10))"``
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"runner": "py", "components": "py", "hydra_plugins": "py", "conf": "yaml", "docs": "md"}
FILES = [
    *sorted(path for folder, kind in FOLDERS.items() for path in (ROOT / folder).rglob(f"*.{kind}")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
ANYWHERE: Mapping[str, str] = {
    "a sentence without a subject": r"(?:^|[.;:] )Of (?!course)",
    "None means ...": r"\bNone: ",
    "besides, or next to": r"\bbeside\b",
    "only": r"(?<!let )(?<!stand )(?<!stay )\balone\b",
    "except": r"\bbut for\b",
    "resumes, or continues": r"\b(?:go(?:es|ing)?|went) on\b",
    "is not a": r"(?<!here )\b(?:is|are|was) no (?!longer\b|more\b)",
    "no person, tell": r"\b(?:tells?|told|telling)\b",
    "no person, vouch": r"\bvouch",
    "if, or when": r"\bwhere (?:there (?:is|are|was)|(?:it|they) (?:is|are|has|have) no|nothing|nobody)",
}
"""The right words -> a pattern of the wrong ones."""
DOCSTRING: Mapping[str, str] = {
    "a verb first": r"^What(?:ever)? ",
    "one sentence in one docstring": r"^\.\.\.|\.\.\.$",
}
"""Patterns for the first paragraph of a docstring only."""
QUOTED = re.compile(r"``.*?``|`[^`]*`|\"[^\"\n]*\"", re.DOTALL)
"""Code and quotations, which are not checked."""


def findings(path: Path) -> list[str]:
    """Return ``line: what to write instead: the words`` for everything found in a file."""
    texts = {".py": python_texts, ".yaml": yaml_comments, ".md": prose}[path.suffix](path.read_text())
    found = []
    for line, is_docstring, text in texts:
        plain = QUOTED.sub("CODE", text)
        for instead, pattern in (ANYWHERE | (DOCSTRING if is_docstring else {})).items():
            for match in re.finditer(pattern, plain):
                words = plain[max(match.start() - 25, 0) : match.end() + 25].strip()
                found.append(f"{line}: {instead}: ... {words} ...")
    return found


def counts() -> dict[str, int]:
    """Return the number of findings of each file that has any, the most first, and their sum."""
    number = {path.relative_to(ROOT).as_posix(): len(findings(path)) for path in FILES}
    ordered = sorted(((name, n) for name, n in number.items() if n), key=lambda pair: -pair[1])
    return dict(ordered) | {"all": sum(number.values())}


def python_texts(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield line, whether it opens a docstring, and text of each paragraph of docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            for number, paragraph in enumerate(value.value.split("\n\n")):
                yield value.lineno, number == 0, " ".join(paragraph.split())
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the comments, those on lines that follow one another as one."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:)", token.string):
            if block and line > last + 1:
                yield first, False, " ".join(block)
                block = []
            first, last = first if block else line, line
            block.append(token.string.lstrip("# "))
    yield first, False, " ".join(block)


def yaml_comments(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the comments of a configuration file, one a line."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#\s*(.*)", line):
            yield number, False, comment[1]


def prose(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the paragraphs, list items and table cells of a page, without its blocks of code."""
    without = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)
    start = 1
    for paragraph in re.split(r"(?<=\n)(?=\n|\||- |#)", without):
        for cell in paragraph.split(" | "):
            yield start, False, " ".join(cell.strip("|\n ").split())
        start += paragraph.count("\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_plain_english(path: Path) -> None:
    found = findings(path)
    assert not found, "\n".join([str(path), *found])


def test_what_is_found_and_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    assert [finding.split(": ")[1] for finding in findings(tmp_path / "bad.py")] == [
        "a verb first",
        "besides, or next to",
        "a sentence without a subject",
        "None means ...",
        "only",
        "is not a",
    ]


BAD = '''
"""What goes into `alone`.

It lies beside "is no".
"""
x = 1
"""Of a run, its folder. None: there is no run."""
# There is no such option, and it is no longer read. This rank
# alone is no reader.
'''
