"""Limits for chat templates, which are third-party code: memory, time, the size of numbers, and the date.

The sandbox of transformers limits what a template may read and the length of a range. It limits neither text
that is made by multiplication, nor powers and nested loops, which can take hours. It also lets a template
write the current date, with which the same data would have other tokens the next day.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import date
from typing import Any, ClassVar

from jinja2 import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

GIB = 2**30
RENDER_BYTES = 4 * GIB
"""Maximum number of bytes that one rendering may add to the memory of the process."""
RENDER_SECONDS = 20.0
"""Maximum processor time of one rendering, in seconds. Usual renderings take a millisecond."""
NUMBER_BITS = 2**16
DAY = date(2024, 7, 26)
"""The date in every text; the template of Llama 3.2 writes this one if there is no ``strftime_now``."""
DATA_COLUMN = 5
"""Column of /proc/self/statm with the memory that RLIMIT_DATA counts, in pages."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, without numbers of more than ``NUMBER_BITS`` bits and the current date.

    Products and powers have this limit, and ``strftime_now`` formats ``DAY``.
    """

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**"})  # type: ignore[misc]

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > NUMBER_BITS:
                raise TemplateRuntimeError(f"a number of more than {NUMBER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return super().make_globals({**(d or {}), "strftime_now": DAY.strftime})


# transformers looks the class up by this name when it compiles a template, and has no option for another one.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


@contextmanager
def limited_memory() -> Iterator[None]:
    """Raise TemplateRuntimeError if the body needs more than ``RENDER_BYTES``.

    Only Linux has this limit; on other systems the body runs without one.
    """
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb", buffering=0) as file:  # Path would take longer than the kernel
        limit = int(file.read().split()[DATA_COLUMN]) * PAGE_BYTES + RENDER_BYTES
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    except MemoryError as error:
        raise TemplateRuntimeError(f"more than {RENDER_BYTES // GIB} GiB for one conversation") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise TemplateRuntimeError if the body takes more than ``RENDER_SECONDS`` of processor time.

    Outside of the main thread, the body runs without a limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TemplateRuntimeError(f"more than {RENDER_SECONDS:.0f} s for one conversation")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
