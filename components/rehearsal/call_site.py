"""The running line of this program and, if that line has called a library, of the library."""

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = f"{Path(__file__).resolve().parents[2]}/"
OWN = (f"{ROOT}components/", f"{ROOT}runner/")
SKIPPED = (f"{ROOT}components/rehearsal/", f"{ROOT}components/contracts/device_copy.py")
"""Files whose callers are shown in their place."""
LIBRARIES = ("megatron/core", "transformers/models", "torch/distributed/fsdp", "torch/optim", "peft/")


@cache
def shown_file(code: CodeType) -> tuple[str, bool] | None:
    """Return the short name of the file of ``code``, and whether the file is one of the program.

    None means that lines of the file are not shown: it is one of ``SKIPPED``, or belongs to neither the
    program nor ``LIBRARIES``.
    """
    name = code.co_filename
    if name.startswith(SKIPPED):
        return None
    if name.startswith(OWN):
        return name.removeprefix(ROOT), True
    if any(library in name for library in LIBRARIES):
        return name.rpartition("site-packages/")[2], False
    return None


def call_site() -> str:
    """Return ``file:line`` of the innermost running line of the program.

    If that line has called one of ``LIBRARIES``, the innermost running line of the library follows after
    ``>``. If only a library is running, the result is the library's line, and in a backward pass that runs
    no Python code of either, ``autograd``.
    """
    library = ""
    walked: FrameType | None = sys._getframe(1)
    while walked is not None:
        found = shown_file(walked.f_code)
        if found is not None:
            here = f"{found[0]}:{walked.f_lineno}"
            if found[1]:
                return f"{here} > {library}" if library else here
            library = library or here
        walked = walked.f_back
    return library or "autograd"
