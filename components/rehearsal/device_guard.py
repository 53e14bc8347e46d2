"""The C++ library that makes torch accept ``cuda`` as a device without a GPU.

This module does not import torch.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from components.contracts.errors import ConfigError

SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def build_guard(folder: Path) -> Path:
    """Return the path of the library for the installed torch in ``folder``; compile it if it is missing.

    Raises:
        ConfigError: if there is no C++ compiler, or the compiler cannot be started or fails.
    """
    version = importlib.metadata.version("torch")
    content = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = folder / f"cuda_guard-{version}-{content}.so"
    if library.is_file():
        return library
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    if not compiler[0]:
        raise ConfigError(
            "preflight.mode=rehearse: compiles a few lines of C++, and this machine has no compiler; "
            "install g++ (apt install g++), or name one in CXX."
        )
    folder.mkdir(parents=True, exist_ok=True)
    include, lib = torch_folder() / "include", torch_folder() / "lib"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, library.name)
        command = [*compiler, *flags, str(SOURCE), f"-L{lib}", "-lc10", "-ltorch_cpu", "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(
                f"CXX: cannot start {compiler[0]} ({error.strerror}); name another compiler."
            ) from error
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise ConfigError(
                f"preflight.mode=rehearse: {compiler[0]} cannot compile {SOURCE.name}: {first}; install "
                "a compiler of C++20 (g++ 10 or later), or name one in CXX."
            )
        made.replace(library)
    return library


def load_guard(library: Path) -> ctypes.CDLL:
    """Load ``library`` before torch is imported, because torch creates its CUDA hooks only once."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
