"""Packages that megatron-core imports for functions that this program does not use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let imports of ``packages`` fail inside the context, unless they have been imported before."""
    new = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(new))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in new:
            del sys.modules[name]
