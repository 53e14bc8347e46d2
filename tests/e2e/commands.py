"""Running the command in this process, in a forked process, or as a user types it."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import psutil
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra.core.default_element import InputDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from benchmarks import compose
from components.contracts.data import SampleKind
from components.data.demo import SplitName, stdlib_records
from components.data.records.samples import Sample
from runner import cli
from tests.forkserver import Process, run_module
from tests.patience import patience

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=16",
    "data.max_length=128",
    "run.max_steps=4",
    "run.log_every=1",
    "run.device=cpu",
    "run.export=false",
)
"""Options of a small version of the default experiment, without an export."""
EXPORTING = (*SMALL, "run.export=true", "run.final_sample_tokens=4")
"""``SMALL`` with an export and a short completion."""

# ---- in this process


def run_here(folder: Path, *overrides: str) -> Path:
    """Run in this process with outputs under ``folder`` and return the newest run folder."""
    code = call_here(f"run.output_dir={folder}", *overrides)
    assert code == 0, f"exit code {code}"
    return newest(folder)


def call_here(*arguments: str) -> int:
    """Run the command in this process, with forked ranks and jobs, and return its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    HydraConfig.instance().cfg = None  # as in a new process; an earlier call has left its own
    with (
        little_data(),
        one_composition(),
        mock.patch("sys.argv", ["runner", *arguments]),
        mock.patch("runner.launch.spawn.subprocess", FORKING),
        mock.patch("runner.sweeps.local_jobs.subprocess", FORKING),
    ):
        return cli.command()


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what ``benchmarks.compose.composed`` returns; each file of options is read once per process."""
    with one_composition():
        return compose.composed(overrides)


@contextmanager
def little_data() -> Iterator[None]:
    """Reduce the embedded data to its first samples. All of it takes 10 s to tokenise and 1 s to evaluate."""

    def first(kind: SampleKind, split: SplitName) -> Iterator[tuple[Sample, str]]:
        documents = kind == "text"
        count = (12 if documents else 240) if split == "train" else (1 if documents else 12)
        return islice(stdlib_records(kind, split), count)

    with mock.patch("components.data.data_sources.stdlib_records", first):
        yield


@contextmanager
def one_composition() -> Iterator[None]:
    """Compose once instead of twice, and read each file of options once per process.

    Nor is a map of all choices made for every file, which only defaults with ``${}`` would read.
    """
    with (
        mock.patch.object(Hydra, "get_mode", mode),
        mock.patch.object(ConfigRepository, "load_config", loaded),
        mock.patch.object(defaults_list, "_create_interpolation_map", choices),
    ):
        yield


def mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return what Hydra composes everything a first time for: ``hydra.mode``, which only sweeps set."""
    swept = any(word.startswith("sweep=") for word in overrides)
    return read_mode(hydra, config_name, overrides) if swept else None


read_mode = Hydra.get_mode


def choices(overrides: object, defaults: Sequence[InputDefault], self_added: bool) -> DictConfig:
    """Return the choices for the names in ``defaults``, as Hydra does, or none if the names need none."""
    needed = any("${" in str(vars(default)) for default in defaults)
    return create_map(overrides, defaults, self_added) if needed else DictConfig({})


create_map = defaults_list._create_interpolation_map


def loaded(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return what ``load_config`` of Hydra returns, from memory for a file that has been read before."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return load_config(repository, config_path)
    key: tuple[Any, ...] = (source.scheme(), source.provider, source.path, config_path)
    if isinstance(source, FileConfigSource):
        about = Path(source.path, source._normalize_file_name(config_path)).stat()
        key += (about.st_ino, about.st_mtime_ns, about.st_size)
    if key not in _loaded:
        _loaded[key] = pickle.dumps(load_config(repository, config_path))
    found: ConfigResult | None = pickle.loads(_loaded[key])  # a copy, in a fifth of the time of deepcopy
    return found


load_config = ConfigRepository.load_config
_loaded: dict[tuple[Any, ...], bytes] = {}


def write_chats(path: Path) -> None:
    """Write forty short chats, for tests of the real command, which would use all embedded data."""
    chats = [{"instruction": f"Count to {n}.", "output": "one more " * n} for n in range(1, 41)]
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))


def newest(folder: Path) -> Path:
    return max(folder.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime_ns).parent


def rows(run: Path, key: str = "step") -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that have ``key``."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def curve(run: Path, *, without: tuple[str, ...] = ("perf/",)) -> list[dict[str, Any]]:
    """Return all rows without the values that may differ between equal runs."""
    return [{k: v for k, v in row.items() if not k.startswith(without)} for row in rows(run)]


class ForkedPopen(Process):
    """Replaces `subprocess.Popen` for the commands ``python -m MODULE`` of the program."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        files = zip((stdin, stdout, stderr), range(3), strict=True)
        numbers = [number if file is None else file.fileno() for file, number in files]
        module = command[command.index("-m") + 1 :]
        kind = "megatron" if trains_with_megatron(module[1:]) else "plain"
        super().__init__(run_module, *module, streams=numbers, environ=env, kind=kind)


def trains_with_megatron(arguments: Sequence[str]) -> bool:
    """Return whether these are the arguments of a rank of a Megatron run."""
    config = Path(*arguments[:1], "config.yaml")
    return config.is_file() and "components.engines.megatron" in config.read_text()


def popen(command: Sequence[str], *, start_new_session: bool, **options: Any) -> Any:
    """Start a process like `subprocess.Popen`, but fork it for ``python -m MODULE``."""
    if "-m" in command[1:3]:
        return ForkedPopen(command, **options)
    return subprocess.Popen(command, start_new_session=start_new_session, **options)


FORKING = SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
"""Replacement of the module `subprocess` in the program."""


# ---- in a forked process


def run_runner(*arguments: str) -> None:
    with little_data(), one_composition():
        run_module("runner", *arguments)


class Command:
    """A function in a forked process, by default ``python -m runner``, whose output goes to files."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
        call: Callable[..., object] = run_runner,
        stdout: int | None = None,
    ) -> None:
        self.arguments = arguments
        self.outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  they live as long as this
        env = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environ or {})
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), *(file.fileno() for file in self.outputs)]
            streams[1] = streams[1] if stdout is None else stdout
            self.process = Process(call, *arguments, streams=streams, environ=env, cwd=cwd)

    def stdout(self) -> str:
        """Return the standard output so far."""
        return read(self.outputs[0])

    def stderr(self) -> str:
        return read(self.outputs[1])

    def until(self, true: Callable[[], object], seconds: float = 60) -> None:
        """Wait until ``true()``. Fail if the process ends first or the time is up."""
        deadline = time.monotonic() + patience(seconds)
        while not true():
            assert self.process.poll() is None, self.stdout() + self.stderr()
            assert time.monotonic() < deadline, self.stdout() + self.stderr()
            time.sleep(0.01)

    def ranks(self) -> list[psutil.Process]:
        """Return all descendants of the process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, seconds: float = 60) -> "subprocess.CompletedProcess[str]":
        """Wait for the end of the process, which is killed if it takes too long."""
        try:
            code = self.process.wait(patience(seconds))
        finally:
            self.process.kill()
        return subprocess.CompletedProcess(self.arguments, code, self.stdout(), self.stderr())


def read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def run_forked(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m runner ARGUMENTS`` in a forked process, which needs no imports, and wait."""
    return Command(*arguments, cwd=cwd, environ=environ).finish()


def left(processes: list[psutil.Process], *, within: float = 5) -> list[psutil.Process]:
    """Return the processes that still run, without zombies, which are collected by their parents."""
    _, alive = psutil.wait_procs(processes, timeout=patience(within))
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


# ---- as a user types it


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "runner", *arguments]


def run_command(
    arguments: list[str], *, cwd: Path, environ: Mapping[str, str] | None = None, seconds: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a real process, which imports for seconds and uses all data. Most tests use `run_forked`."""
    own_cache = {"RUNNER_CACHE": os.environ["RUNNER_CACHE"] + "-whole"}
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | own_cache | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=patience(seconds),
        check=False,
    )
