"""Test processes forked from one that has imported torch, transformers, Megatron and the program.

A new Python process spends about five CPU seconds on imports; a forked one starts at once. The server,
``python -m tests.forkserver``, is started once per session and imports at the first request. `Process` sends
requests. A forked process behaves like a new one: it has its own environment, working directory, standard
streams, signal handlers and exit code, and the processes that it starts with ``python -m`` are forked too.
"""

import atexit
import contextlib
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from components.rehearsal import device_guard
from runner.garbage_collection import collect_rarely
from tests import budget

ADDRESS = "RUNNER_TEST_FORKSERVER"
"""Environment variable: the folder of the server's sockets."""
PRELOADED: Mapping[str, tuple[str, ...]] = {
    "plain": (
        "torch.testing",
        "bitsandbytes.optim",
        "peft.tuners",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.generation",
        "components.engines.fsdp2.engine",
        "components.losses",
        "components.schedulers",
        "runner.cli",
        "runner.launch.run",
        "runner.training.rank",
    ),
    # Megatron's patches replace names of torch.cuda, which must stay unchanged in a process without Megatron.
    "megatron": ("components.engines.megatron.runtime.engine",),
    "rehearsal": (
        "peft.tuners",
        "transformers.models.qwen3.modeling_qwen3",
        "components.engines.fsdp2.engine",
        "components.engines.megatron.runtime.engine",
        "components.losses",
        "components.rehearsal.rehearsed_run",
        "components.schedulers",
        "runner.training.rehearsal",
    ),
}
MESSAGE_BYTES = 1 << 17
GUARD = Path(tempfile.gettempdir(), f"runner-guard-{os.getuid()}")
"""Folder of the library of rehearsals, compiled once for all sessions."""
INSTALLED = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
"""Entries of ``sys.path`` from which the server imports installed packages."""


@dataclass(frozen=True)
class Request:
    """The function that a forked process calls, with its environment and working directory."""

    call: Callable[..., object]
    args: tuple[Any, ...]
    environ: dict[str, str]
    cwd: str


class Process:
    """A forked process that calls ``call(*args)`` and exits, with the methods of `subprocess.Popen`.

    Args:
        call: a module-level function. Its arguments are the numbers of ``descriptors``, then ``args``.
        streams: file descriptors of its standard input, output and error. By default the input is empty and
            the output goes to the streams of this process.
        kind: ``"megatron"`` forks from a process that has also imported Megatron.
    """

    def __init__(
        self,
        call: Callable[..., object],
        *args: Any,
        streams: Sequence[int] = (),
        descriptors: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        kind: str = "plain",
    ) -> None:
        budget.count("forked")
        self.returncode: int | None = None
        self.keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.keeper.connect(str(address() / kind))
        request = Request(
            call, args, dict(os.environ if environ is None else environ), str(cwd or Path.cwd())
        )
        # The path goes first: the request may name a module of the tests.
        message = pickle.dumps((sys.path, pickle.dumps(request)))
        with open(os.devnull) as nothing:
            socket.send_fds(self.keeper, [message], [*(streams or (nothing.fileno(), 1, 2)), *descriptors])
        self.pid: int = pickle.loads(self._receive())

    def _receive(self) -> bytes:
        message = self.keeper.recv(MESSAGE_BYTES)
        assert message, "the fork server has ended; its words are above"
        return message

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.keeper], [], [], 0)[0]:
            self.returncode = pickle.loads(self._receive())
            self.keeper.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self.keeper], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ---- the server


def address() -> Path:
    """Return the folder of the server's sockets. Start a server unless a parent of this process has."""
    if ADDRESS not in os.environ:
        start()
    return Path(os.environ[ADDRESS])


def leave_files_unsynced() -> None:
    """Do not wait for the disk: also after a SIGKILL, other processes read what has been written."""
    os.fsync = lambda _: None


def start() -> None:
    """Start the server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="runner-forks-")
    listeners = []
    for kind in PRELOADED:
        listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listeners[-1].bind(f"{folder.name}/{kind}")
        listeners[-1].listen(128)
    numbers = [listener.fileno() for listener in listeners]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forkserver", *map(str, numbers)],
        cwd=Path(__file__).parents[1],
        # Torch reads the number of threads when it is imported.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        pass_fds=numbers,
    )
    for listener in listeners:
        listener.close()
    os.environ[ADDRESS] = folder.name

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)


def serve(listeners: dict[str, socket.socket], alive: io.IOBase) -> None:
    """Fork a process for every request until ``alive`` is closed. Import only at the first request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the session
    loaded, kind = False, "plain"
    rehearsal = listeners.pop("rehearsal")
    if os.fork() == 0:  # now, because its library must be loaded before torch
        listeners, kind = {"plain": rehearsal}, "rehearsal"
    while True:
        ready, _, _ = select.select([alive, *listeners.values()], [], [])
        if alive in ready:
            return
        if not loaded:
            preload(kind)
            loaded = True
        if "megatron" in listeners and listeners["megatron"] in ready:
            megatron = listeners.pop("megatron")
            if os.fork() == 0:
                preload("megatron")
                listeners.clear()
                listeners["plain"] = megatron
            continue
        if listeners["plain"] in ready:
            connection, _ = listeners["plain"].accept()
            if os.fork() == 0:
                keep(connection)
            connection.close()


def preload(kind: str) -> None:
    leave_files_unsynced()
    if kind == "rehearsal":
        guard = device_guard.load_guard(device_guard.build_guard(GUARD))
        importlib.import_module("torch")
        guard.register_guard()
        from components.rehearsal import fake_cuda, mode

        # Megatron is imported next, and is patched for the CPU unless there is a GPU.
        fake_cuda.install(fake_cuda.Gpu("H100", 80 * 10**9), mode.RehearsalMode())
    for name in PRELOADED[kind]:
        importlib.import_module(name)
    if kind != "rehearsal":
        import torch

        from components.preflight.estimates.flops import peak_flops

        peak_flops(torch.device("cpu"), torch.float32)  # a run of the children would measure it twice
    gc.collect()
    gc.freeze()  # collections in the children would copy these pages
    collect_rarely()


def keep(connection: socket.socket) -> NoReturn:
    """Report the exit code of one forked process, and kill it when its client has ended.

    A time limit sends its signal to the whole process group. It must end the client, but not this process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 32)
    pid = os.fork()
    if pid == 0:
        connection.close()
        enter(message, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)

    def end_with_client() -> None:
        if not connection.recv(1):
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                os.kill(pid, signal.SIGKILL)

    connection.send(pickle.dumps(pid))
    threading.Thread(target=end_with_client, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    try:
        connection.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


def enter(message: bytes, descriptors: list[int]) -> NoReturn:
    """Turn this process into the requested one."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.path[:], packed = pickle.loads(message)
    request: Request = pickle.loads(packed)
    os.chdir(request.cwd)
    if "RUNNER_PARENT" in request.environ:  # it ends with its keeper, which ends with the client
        request.environ["RUNNER_PARENT"] = str(os.getppid())
    run(partial(request.call, *descriptors[3:], *request.args), request.environ)


# ---- the start of a new process


def run(call: Callable[[], object], environ: Mapping[str, str]) -> NoReturn:
    """Call ``call`` as the main program of a new process and exit as the interpreter does."""
    gc.freeze()  # never collect inherited objects: their threads do not exist in this process
    gc.enable()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Popen has restored them; an interpreter ignores them
        signal.signal(number, signal.SIG_IGN)
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGQUIT,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        lines = name == "stderr" or raw.isatty()
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    count_lines_for(os.environ.get("PYTEST_CURRENT_TEST", ""))
    code = 0
    try:
        call()
    except SystemExit as leaving:
        code = exit_code(leaving)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  printed, as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def count_lines_for(test: str) -> None:
    """If coverage is measured, attribute the lines that this process runs from now on to ``test``."""
    if "coverage" in sys.modules:
        from coverage import Coverage

        if (measuring := Coverage.current()) is not None:
            measuring.switch_context(test)


def exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def run_module(name: str, *arguments: str) -> None:
    """Run a module as ``python -m name arguments`` does, in the working directory of this process."""
    import runpy

    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd(), *own, *INSTALLED]
    sys.argv = [name, *arguments]  # runpy replaces the first one by the module's file
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks this process for ``python -m MODULE`` and starts any other command.

    The module runs in the hook that `subprocess` calls between its fork and its exec, which never follows.
    Streams, sessions and working directories are therefore set up by `subprocess` itself.
    """

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        words = [*args] if isinstance(args, list | tuple) else []
        if words[:1] == [sys.executable] and "-m" in words[1:3]:
            module, *arguments = map(os.fspath, words[words.index("-m") + 1 :])
            environ = dict(os.environ if options.get("env") is None else options["env"])
            main = partial(run_module, module, *arguments)
            options["preexec_fn"] = partial(after_fork, main, environ, options.get("pass_fds", ()))
        super().__init__(args, *more, **options)


def after_fork(call: Callable[[], object], environ: Mapping[str, str], kept: Sequence[int]) -> NoReturn:
    """Close all descriptors except the standard streams and ``kept``, as an exec would, and run ``call``."""
    first = 3
    for number in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, number)
        first = number + 1
    run(call, environ)


if __name__ == "__main__":
    # Import it under its own name, because requests are pickled with the name of this module.
    from tests import forkserver

    sockets = {
        kind: socket.socket(fileno=int(number)) for kind, number in zip(PRELOADED, sys.argv[1:], strict=True)
    }
    forkserver.serve(sockets, sys.stdin)
