"""Small changes of one source file, each of which leaves all other bytes of the text as they are."""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from difflib import unified_diff
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

PAIRS = "+ -, * /, < <=, > >=, == !=, and or, is is_not, in not_in"
OPERATORS = {
    left.replace("_", " "): right.replace("_", " ")
    for pair in PAIRS.split(", ")
    for left, right in (pair.split(), pair.split()[::-1])
} | {"//": "*"}
TOKEN = re.compile(r"is\s+not|not\s+in|\b(?:is|in|and|or)\b|<<|>>|\*\*|//|[<>=!]=|[-+*/<>]")
COMMUTATIVE = {"equal", "gcd", "lcm", "max", "maximum", "min", "minimum"}
"""Functions whose arguments may be swapped without any effect."""
NO_STRINGS = re.compile(
    r"critical|debug|error|exception|info|print|warn|\w*(Error|Warning|warning)|cast|TypeVar"
)
"""Functions with messages or names of types as arguments. Strings in their arguments are not mutated."""
TYPE = re.compile(r"[A-Z][a-z]|(?:dict|list|set|tuple|type)$")
"""Names of types. The brackets after such a name contain an annotation, which is not mutated."""
GPU_ONLY = re.compile(r"== '(?:cuda|nccl|liger)'|(?<!not )\b(?:is_cuda|transformer_engine)\b")
"""Conditions (in the style of `ast.unparse`) whose body runs only on a GPU. Its lines are not drawn.

Other lines that no CPU reaches carry a ``# pragma: no cover`` comment.
"""
Deletable = ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Raise
Change = tuple[str, int, int, str]
"""The name of the operator, the start and end of the replaced text as byte offsets, and the new text."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    change: Change
    statement: tuple[int, int]
    """First and last line of the statement, or of the head of a compound statement."""
    at_import: bool
    """True if the code runs when its module is imported, and not when a function is called."""

    def apply(self, source: bytes) -> bytes:
        _, start, end, text = self.change
        return source[:start] + text.encode() + source[end:]

    def diff(self, source: bytes) -> list[str]:
        """Return the changed lines before (-) and after (+) the change."""
        before, after = source.decode().splitlines(), self.apply(source).decode().splitlines()
        lines = list(unified_diff(before, after, n=0, lineterm=""))[2:]
        return [line for line in lines if not line.startswith("@@")]

    def is_valid(self, source: bytes) -> bool:
        """Return whether the changed file compiles and has another syntax tree."""
        changed = self.apply(source)
        with warnings.catch_warnings(action="ignore"):
            try:
                compile(changed, self.path, "exec")
            except SyntaxError:
                return False
            return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


class Place(NamedTuple):
    """Context of a syntax node: its innermost statement, and whether its code runs at import.

    ``no_strings`` means that its string constants are not mutated.
    """

    statement: ast.stmt | None = None
    at_import: bool = True
    no_strings: bool = False


class Finder:
    """A finder of all mutants of one file, except in lines that are excluded from coverage."""

    def __init__(self, path: str, source: bytes, excluded: AbstractSet[int] = frozenset()) -> None:
        self.path, self.source, self.excluded = path, source, excluded
        self.starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    def mutants(self) -> Iterator[Mutant]:
        for node, (statement, at_import, no_strings) in walk(ast.parse(self.source), Place()):
            if statement is None or statement.lineno in self.excluded:
                continue
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if body else statement.end_lineno or 0
            for change in self.changes(node, no_strings):
                line = self.source.count(b"\n", 0, change[1]) + 1
                if line not in self.excluded:
                    yield Mutant(self.path, line, change, (statement.lineno, last), at_import)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        line, column = node.end_lineno, node.end_col_offset
        assert line is not None
        assert column is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[line - 1] + column

    def code(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def changes(self, node: ast.AST, no_strings: bool) -> Iterator[Change]:
        """Yield every change of one node."""
        match node:
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                yield from self.operators([left, right])
            case ast.BoolOp(values=operands):
                yield from self.operators(operands)
            case ast.Compare():
                yield from self.operators([node.left, *node.comparators])
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self.span(node)
                yield "not dropped", start, start + len("not"), ""
            case ast.Call():
                yield from self.calls(node)
            case ast.Constant(value=value) if not (no_strings and isinstance(value, str)):
                if isinstance(value, bool | int | float | str | bytes):
                    yield "constant", *self.span(node), other(value)
            case ast.If() | ast.IfExp() if not is_for_types(node):
                yield "if negated", *self.span(node.test), f"not ({self.code(*self.span(node.test))})"
            case ast.Return(value=ast.expr()):
                yield "return None", *self.span(node), "return None"
        if isinstance(node, Deletable) and getattr(node, "value", node) is not None:
            yield "statement deleted", *self.span(node), "pass"

    def operators(self, operands: list[ast.expr]) -> Iterator[Change]:
        """Yield the changes of the operators between operands."""
        for left, right in pairwise(operands):
            start, end = self.span(left)[1], self.span(right)[0]
            gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[start:end]).decode()
            token = TOKEN.search(gap)
            if token and (text := OPERATORS.get(" ".join(token[0].split()))):
                yield f"{token[0]} to {text}", start + token.start(), start + token.end(), text

    def calls(self, node: ast.Call) -> Iterator[Change]:
        name, end = called(node), self.span(node.func)[1]
        if name in {"min", "max"}:
            yield "min and max", end - len(name), end, "max" if name == "min" else "min"
        first_two = node.args[:2]
        if (
            len(first_two) == 2
            and name not in COMMUTATIVE
            and not any(isinstance(argument, ast.Starred) for argument in first_two)
        ):
            (start, stop), (resume, end) = map(self.span, first_two)
            text = self.code(resume, end) + self.code(stop, resume) + self.code(start, stop)
            yield "arguments swapped", start, end, text


def other(value: float | str | bytes) -> str:
    """Return the source text of another constant of the same type."""
    if isinstance(value, bool):
        return repr(not value)
    if isinstance(value, str):
        return repr(value + "x")
    return repr(value + b"x" if isinstance(value, bytes) else value + 1)


def walk(node: ast.AST, place: Place) -> Iterator[tuple[ast.AST, Place]]:
    """Yield the nodes that may be mutated, each with the innermost statement around it."""
    if is_kept(node):
        return
    if isinstance(node, ast.stmt):
        place = Place(node, place.at_import)
    if isinstance(node, ast.Call) and NO_STRINGS.fullmatch(called(node)):
        place = place._replace(no_strings=True)
    yield node, place
    skipped = {"annotation", "decorator_list", "returns"}
    if isinstance(node, ast.Raise):
        skipped = {"exc", "cause"}
    elif is_for_types(node):
        skipped = {"test", "body"}
    elif isinstance(node, ast.If) and GPU_ONLY.search(ast.unparse(node.test)):
        skipped = {"body"}
    for name, value in ast.iter_fields(node):
        is_later = name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from walk(child, place._replace(at_import=place.at_import and not is_later))


def is_kept(node: ast.AST) -> bool:
    """Return whether nothing in a node is ever mutated."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="non_blocking" | "pin_memory" | "why"):
            return True  # a docstring, an option without any effect on the CPU, or the reason for a patch
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return name == "__all__"
        case ast.Subscript(value=ast.Name(id=name)):
            return TYPE.match(name) is not None
    return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def called(node: ast.Call) -> str:
    """Return the last part of the name of the called function, or ''."""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def draw(sources: Mapping[str, bytes], mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` lines at random, and for each of them one of its valid mutants."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in sorted(mutants):
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    rng, drawn = Random(seed), []
    for path, line in rng.sample(sorted(by_line), len(by_line)):
        choices = by_line[path, line]
        rng.shuffle(choices)
        drawn += [mutant for mutant in choices if mutant.is_valid(sources[path])][:1]
        if len(drawn) == count:
            break
    return drawn
