"""Starting the ranks of a run on this machine, watching them, and leaving none behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import torch.distributed as dist

from runner.errors import TrainingError

POLL_S = 0.05
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""


def run_workers(folder: Path, world_size: int) -> None:
    """Runs ``python -m runner.worker FOLDER`` on every rank and returns when all have succeeded.

    Raises:
        TrainingError: a rank failed; all others are ended first, and the message carries its traceback.
    """
    for report in folder.glob("logs/error_*.json"):
        report.unlink()  # of the run that this one continues
    # The ranks meet at a store of this process: no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_raise())
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(end, ranks)
        # Rank 0 writes to our terminal, the others to a log of their own.
        logs = [stack.enter_context(rank_log(folder, rank).open("wb")) for rank in range(1, world_size)]
        for rank, output in enumerate([None, *logs]):
            ranks.append(start(folder, rank, world_size, store.port, output))
        wait(folder, ranks)


def start(
    folder: Path, rank: int, world_size: int, port: int, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own, writing to ``output`` (None: where this process writes)."""
    threads = max((os.cpu_count() or 1) // world_size, 1)
    environ = (
        {"OMP_NUM_THREADS": str(threads)}
        | dict(os.environ)
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # Every rank is a client of the store at MASTER_PORT, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RUNNER_PARENT": str(os.getpid()),
        }
    )
    command = [sys.executable, "-m", "runner.worker", str(folder)]
    return subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)


def wait(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            time.sleep(2 * POLL_S)  # peers of the first failure may be writing their own report
            raise TrainingError(blame(folder, [rank.poll() for rank in ranks]))
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to every rank's session, SIGKILL to what is left after the grace period."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave ranks behind
    for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        alive = [process for process in ranks if process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def blame(folder: Path, codes: list[int | None]) -> str:
    """The report of the rank that failed first: a peer's broken connection is only its consequence."""
    reports = [json.loads(path.read_text()) for path in folder.glob("logs/error_*.json")]
    # A rank that was killed, or left without a word, has no report and cannot be anyone's consequence.
    reported = {report["rank"] for report in reports}
    silent = [r for r, code in enumerate(codes) if code not in (None, 0) and r not in reported]
    if reported:  # NCCL aborts the peers of a rank that failed
        silent = [r for r in silent if codes[r] != -signal.SIGABRT]
    if silent:
        rank = silent[0]
        return f"rank {rank} {how_it_ended(codes[rank])}{last_lines(rank_log(folder, rank))}"
    first = min(reports, key=lambda report: report["time"])
    return f"rank {first['rank']} failed:\n{first['traceback']}"


def how_it_ended(code: int | None) -> str:
    assert code is not None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def last_lines(path: Path, count: int = 20) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
    return "".join(f"\n  {line}" for line in lines)


def rank_log(folder: Path, rank: int) -> Path:
    path = folder / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(exist_ok=True)
    return path


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt here, even where the shell had them ignored."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
