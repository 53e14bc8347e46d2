"""The embedded data: the Python standard library of the interpreter that runs the program.

Modules are read and parsed, never imported. For one Python installation the samples, their order and the
split are always the same.
"""

import ast
import hashlib
import inspect
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.contracts.data import PAIRS, SampleKind
from components.contracts.errors import ConfigError
from components.data.records.samples import ChatSample, PreferenceSample, Sample, TextSample, UnpairedSample

SplitName = Literal["train", "eval"]

# Skipped: packages outside of the library proper, tests, and modules that are tables rather than code.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_SKIPPED_PREFIXES = ("site-packages", "dist-packages", "config-", "_sysconfigdata", "__phello__")
_SKIPPED_FILES = frozenset({"html/entities.py", "pickletools.py"})
_MAX_SOURCE_BYTES = 256 * 1024
_ANSWER_CHARS = range(24, 1201)
_EVAL_PERCENT = 5

_QUESTIONS = (
    "What does the {kind} `{name}` of the Python module `{module}` do?",
    "Explain the {kind} `{name}` from `{module}`.",
    "In Python's `{module}`, what is the {kind} `{name}` for?",
    "Describe `{module}.{name}`.",
)


@dataclass(frozen=True)
class _Entry:
    """A function, method or class with its docstring, ``answer``."""

    module: str
    name: str
    kind: str
    answer: str
    origin: str

    def question(self) -> str:
        wording = _QUESTIONS[_stable_hash(f"{self.origin} {self.name}") % len(_QUESTIONS)]
        return wording.format(kind=self.kind, name=self.name, module=self.module)


def stdlib_records(kind: SampleKind, split: SplitName) -> Iterator[tuple[Sample, str]]:
    """Yield (sample, origin) of one split.

    Each module is in exactly one of the two splits. The ``kind`` determines a sample. For text, it is the
    source of a module. For chat, it is a question about a function, class or method, answered with its
    docstring. For preference, it is this question with the right docstring as chosen and another one of the
    module as rejected. For unpaired, it is this question with one of the two docstrings, the right one in
    about half of the samples.
    """
    for path, module in _modules(split):
        if kind == "text":
            source = _read(path)
            if source.strip():
                yield TextSample(source), f"{path}:1"
            continue
        entries = _entries(path, module)
        for entry in entries:
            sample = _sample(kind, entry, entries)
            if sample is not None:
                yield sample, entry.origin


def _modules(split: SplitName) -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):  # installed packages, with many files, are not entered
        folders[:] = [name for name in folders if not _skipped(Path(name))]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    modules = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if not _skipped(relative) and path.stat().st_size <= _MAX_SOURCE_BYTES:
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            modules.append((path, name))
    if not modules:
        raise ConfigError(
            f"data=demo: no Python sources under {root} (a zipped or stripped Python). "
            "Use data=files data.train=PATH, or a Python that ships its library as .py files."
        )
    held_out = split == "eval"
    return [one for one in modules if (_stable_hash(one[1]) % 100 < _EVAL_PERCENT) == held_out]


def _skipped(relative: Path) -> bool:
    return (
        any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in relative.parts)
        or relative.as_posix() in _SKIPPED_FILES
    )


def _stable_hash(text: str) -> int:
    """Return a hash that, unlike ``hash``, is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _read(path: Path) -> str:
    with tokenize.open(path) as file:  # honours the file's own encoding declaration
        return file.read()


def _entries(path: Path, module: str) -> list[_Entry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in sources of the library
        tree = ast.parse(_read(path))
    entries = []
    for node, name, kind in _definitions(tree, "", "function"):
        answer = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
        if len(answer) in _ANSWER_CHARS:
            entries.append(_Entry(module, name, kind, answer, f"{path}:{node.lineno}"))
    return entries


def _definitions(
    parent: ast.Module | ast.ClassDef, prefix: str, function_kind: str
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, str, str]]:
    for node in parent.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, prefix + node.name, function_kind
        elif isinstance(node, ast.ClassDef):
            yield node, prefix + node.name, "class"
            yield from _definitions(node, f"{prefix}{node.name}.", "method")


def _sample(kind: SampleKind, entry: _Entry, entries: list[_Entry]) -> Sample | None:
    if kind == "chat":
        answer = {"role": "assistant", "content": entry.answer}
        return ChatSample([{"role": "user", "content": entry.question()}, answer], tools=None)
    pair = _preference(entry, entries)
    if kind in PAIRS or pair is None:
        return pair
    desirable = _stable_hash(f"label {entry.origin} {entry.name}") % 2 == 0
    completion = pair.chosen if desirable else pair.rejected
    return UnpairedSample(pair.prompt, completion, desirable, None, kl_completion=completion)


def _preference(entry: _Entry, entries: list[_Entry]) -> PreferenceSample | None:
    """Return a pair. None means that the module has no other docstring that could be the rejected answer."""
    others = [other.answer for other in entries if other.answer != entry.answer]
    if not others:
        return None
    rejected = others[_stable_hash(f"rejected {entry.origin} {entry.name}") % len(others)]
    return PreferenceSample(
        prompt=[{"role": "user", "content": entry.question()}],
        chosen=[{"role": "assistant", "content": entry.answer}],
        rejected=[{"role": "assistant", "content": rejected}],
        tools=None,
    )
