"""Starting the ranks of a run on this machine, watching them, and leaving none behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch.distributed as dist

from components.contracts.errors import DONE, NonRetryableError
from components.rank_info import RankInfo
from runner.launch.failures import clear_failure_reports, has_stalled, rank_log, root_cause
from runner.launch.signals import REQUESTS, SignalHandler, announce, handling
from runner.search_path import python_module
from runner.training.watchdog import discard_if_empty, stacks_path

CORES = "RUNNER_CORES"
"""Environment variable of a job: the number of cores that all its ranks together may use."""
POLL_S = 0.05
GRACE_S = 2.0
"""For stacks to be written, and for killed processes to be gone."""

Ranks = Sequence["subprocess.Popen[bytes]"]


def run_workers(folder: Path, world_size: int) -> None:
    """Runs ``python -m runner.launch.rank_main FOLDER`` on every rank and returns when all have succeeded.

    The first signal is passed on to the ranks, which end with a checkpoint.

    Raises:
        TrainingError: a rank failed; all others are ended first, and the message carries its traceback.
            FinalError: it would fail again, or was to end anyway.
        KeyboardInterrupt: a signal came before the ranks could answer it, or came twice.
    """
    clear_failure_reports(folder)
    # The ranks meet at a store of this process: no port is chosen before it is bound.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(terminate_ranks, folder, ranks)
        # Rank 0 writes to our terminal, the others to a log of their own.
        logs = [stack.enter_context(rank_log(folder, rank).open("ab")) for rank in range(1, world_size)]
        for rank, output in enumerate([None, *logs]):
            ranks.append(start_rank(folder, rank, world_size, store.port, output))
        request = SignalHandler(lambda number: forward_signal(number, ranks))
        with handling(request):
            wait_for_ranks(folder, ranks, request)


def start_rank(
    folder: Path, rank: int, world_size: int, port: int, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own, writing to ``output`` (None: where this process writes)."""
    place = RankInfo(rank, world_size, rank, world_size, master_port=port)
    cores = os.environ.get(CORES)
    threads = {"OMP_NUM_THREADS": str(max(int(cores or os.cpu_count() or 1) // world_size, 1))}
    environ = (
        threads
        | dict(os.environ)
        | (threads if cores else {})  # over that of the job, which has all its cores
        | place.variables()
        | {
            # Every rank is a client of the store at MASTER_PORT, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RUNNER_PARENT": str(os.getpid()),
        }
    )
    command = [*python_module("runner.launch.rank_main"), str(folder)]
    return subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)


def forward_signal(number: int, ranks: Ranks) -> None:
    announce(number)  # not by a rank, whose main thread may wait for another rank
    for process in ranks:
        process.send_signal(number)


def wait_for_ranks(folder: Path, ranks: Ranks, request: SignalHandler) -> None:
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == DONE for code in codes):
            return
        if any(code not in (None, DONE) for code in codes):
            time.sleep(2 * POLL_S)  # peers of the first failure may be writing their own report
            break
        time.sleep(POLL_S)
    codes = [rank.poll() for rank in ranks]
    if request.number and any(-number in codes for number in REQUESTS):
        # A rank that had not begun to train.
        raise KeyboardInterrupt(signal.Signals(request.number).name)
    if has_stalled(folder):
        ask_for_stacks(folder, ranks)
    failure = root_cause(folder, codes)
    raise NonRetryableError(failure) if request.number else failure


def ask_for_stacks(folder: Path, ranks: Ranks) -> None:
    """Of those that still run; they write them whatever they are doing, and need little time for it."""
    paths = [stacks_path(folder / "logs", rank) for rank in range(len(ranks))]
    running = zip(ranks, paths, strict=True)
    waiting = [(r, path, path.stat().st_size) for r, path in running if r.poll() is None and path.exists()]
    for process, _, _ in waiting:
        process.send_signal(signal.SIGQUIT)
    deadline = time.monotonic() + GRACE_S
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_S)
        waiting = [(r, path, size) for r, path, size in waiting if path.stat().st_size == size]


def terminate_ranks(folder: Path, ranks: Ranks) -> None:
    """SIGKILL to every rank's session: what could be saved has been."""
    with handling(lambda *_: None):  # an impatient second Ctrl-C must not leave ranks behind
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        for rank in range(len(ranks)):
            discard_if_empty(stacks_path(folder / "logs", rank))
