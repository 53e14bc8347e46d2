"""Replacements of symbols in other libraries, each with its reason."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import version
from pkgutil import resolve_name
from threading import get_ident

from packaging.specifiers import SpecifierSet

Function = Callable[..., object]


@dataclass(frozen=True)
class Patch:
    """The replacement of one object, under all names it has, and its reason."""

    symbols: tuple[str, ...]
    """Dotted names of one object, which has another name in every module that imports it by name."""
    why: str
    replace: Callable[..., object]
    """Function from the original to its replacement. It is called once per symbol and returns a new object
    each time, because torch._dynamo fails if one object has two rules."""
    versions: str = ">=0.16"
    """Version specifier of the megatron-core releases that need the patch."""
    originals: dict[str, object] = field(default_factory=dict, repr=False)
    """The originals by symbol, filled by ``install``."""

    @property
    def applies(self) -> bool:
        return SpecifierSet(self.versions, prereleases=True).contains(version("megatron-core"))

    def install(self) -> None:
        """Replace every symbol; raise AttributeError if one is missing, as the patch must then be revised."""
        for symbol in self.symbols:
            owner, name = find(symbol)
            self.originals[symbol] = getattr(owner, name)
            setattr(owner, name, self.replace(self.originals[symbol]))


def install(patches: Iterable[Patch]) -> None:
    """Install those ``patches`` that the installed release of megatron-core needs.

    Raises:
        AttributeError: if the symbol of such a patch is missing.
    """
    for patch in patches:
        if patch.applies:
            patch.install()


def find(symbol: str) -> tuple[object, str]:
    """Return the module or class that ``symbol`` is an attribute of, and the attribute's name.

    Raises:
        AttributeError: if there is no such module, class or attribute.
    """
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


def during(owner: object, name: str, replace: Callable[..., Function]) -> Callable[[Function], Function]:
    """Return a ``Patch.replace`` that replaces attribute ``name`` of ``owner`` while the function runs.

    The replacement applies only to the calling thread, because another thread may be writing a checkpoint.
    """

    def around(function: Function) -> Function:
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
