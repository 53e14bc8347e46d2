"""A replacement for something in another library, with the reason for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import version
from pkgutil import resolve_name
from threading import get_ident
from typing import Any

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Patch:
    """What is replaced, why, and by what."""

    symbols: tuple[str, ...]
    """Dotted names of one and the same thing: modules that import a function by name each have their own."""
    why: str
    replace: Callable[[Any], Any]
    """From the original to its replacement. Called for every symbol, and every call makes an object of its
    own: torch._dynamo has one rule for an object, and dies of a second."""
    versions: str = ">=0.16"
    """The releases of megatron-core that need it."""
    originals: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the symbols were before ``install``."""

    @property
    def applies(self) -> bool:
        return SpecifierSet(self.versions, prereleases=True).contains(version("megatron-core"))

    def install(self) -> None:
        """Replaces every symbol; AttributeError where one is gone, since what it did must then be found."""
        for symbol in self.symbols:
            owner, name = find(symbol)
            self.originals[symbol] = getattr(owner, name)
            setattr(owner, name, self.replace(self.originals[symbol]))


def install(patches: Iterable[Patch]) -> None:
    """Installs those that this release of megatron-core needs."""
    for patch in patches:
        if patch.applies:
            patch.install()


def find(symbol: str) -> tuple[object, str]:
    """The module or class that ``symbol`` is an attribute of, and its name there."""
    path, _, name = symbol.rpartition(".")
    try:
        owner = resolve_name(path)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise AttributeError(
            f"{symbol} is to be patched, and is neither in megatron-core {version('megatron-core')} nor in "
            f"torch {version('torch')}: the patch must be written anew, or the release be left out of it."
        ) from error
    return owner, name


def during(owner: object, name: str, replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A ``Patch.replace``: the function as it was, but ``owner.name`` is replaced while it runs.

    For its own thread: another may be writing a checkpoint.
    """

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: object, **kwargs: object) -> object:
            original, thread = getattr(owner, name), get_ident()
            replaced = replace(original)

            def either(*args: object, **kwargs: object) -> object:
                return (replaced if get_ident() == thread else original)(*args, **kwargs)

            setattr(owner, name, either)
            try:
                return function(*args, **kwargs)
            finally:
                setattr(owner, name, original)

        return wrapped

    return around
