"""Start, watch and end the ranks of a run on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from components.contracts.errors import DONE, NonRetryableError
from components.rank_info import CORES, RankInfo, num_cores
from runner.launch.rendezvous import host_loopback_store
from runner.records.failures import (
    clear_failure_reports,
    failure_path,
    rank_log,
    read_failure_reports,
    root_cause,
)
from runner.search_path import python_module
from runner.signals import REQUESTS, SignalHandler, announce, handling
from runner.training.watchdog import discard_if_empty, stacks_path

POLL_S = 0.05
TRACKERS_S = 30.0
"""Seconds in which rank 0 may close its trackers after it has reported a failure."""
GRACE_S = 2.0
"""Longest wait in seconds, for stacks to be written and for each killed process to end."""

Ranks = Sequence["subprocess.Popen[bytes]"]


def run_workers(folder: Path, world_size: int) -> int:
    """Run ``python -m runner.launch.rank_main FOLDER`` for every rank; return when all have succeeded.

    The first signal is passed on to the ranks, which save a checkpoint and end. Return its number, or 0.

    Raises:
        TrainingError: if a rank failed, after all other ranks have been ended. The message has the traceback
            of the failed rank. It is a NonRetryableError if the rank would fail again, or after a stop
            signal.
        KeyboardInterrupt: if a signal came before the ranks could handle it, or if SIGINT or SIGTERM came
            twice.
    """
    clear_failure_reports(folder)
    store = host_loopback_store()
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(terminate_ranks, folder, ranks)
        # Rank 0 writes to this terminal, every other rank to its own log.
        logs = [stack.enter_context(rank_log(folder, rank).open("ab")) for rank in range(1, world_size)]
        for rank, output in enumerate([None, *logs]):
            ranks.append(start_rank(folder, rank, world_size, store.port, output))
        request = SignalHandler(lambda number: forward_signal(number, ranks))
        with handling(request):
            wait_for_ranks(folder, ranks, request)
    return request.number


def start_rank(
    folder: Path, rank: int, world_size: int, port: int, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start one rank in a new session. None for ``output`` means the output of this process."""
    place = RankInfo(rank, world_size, rank, world_size, master_port=port)
    threads = {"OMP_NUM_THREADS": str(max(num_cores() // world_size, 1))}
    environ = (
        threads
        | dict(os.environ)
        | (threads if CORES in os.environ else {})  # a sweep's job counts all its cores
        | place.variables()
        | {
            # Every rank is a client of the store at MASTER_PORT, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RUNNER_PARENT": str(os.getpid()),
        }
    )
    command = [*python_module("runner.launch.rank_main"), str(folder), *map(os.path.abspath, sys.path)]
    return subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)


def forward_signal(number: int, ranks: Ranks) -> None:
    announce(number)  # here, because the main thread of a rank may wait for another rank
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
    deadline = time.monotonic() + TRACKERS_S
    while ranks[0].poll() is None and failure_path(folder, 0).exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    codes = [rank.poll() for rank in ranks]
    if request.number and any(-number in codes for number in REQUESTS):
        # A rank had not begun to train.
        raise KeyboardInterrupt(signal.Signals(request.number).name)
    if any(report.stalled for report in read_failure_reports(folder)):
        ask_for_stacks(folder, ranks)
    failure = root_cause(folder, codes)
    raise NonRetryableError(failure) if request.number else failure


def ask_for_stacks(folder: Path, ranks: Ranks) -> None:
    """Send SIGQUIT to the ranks that still run, and wait up to GRACE_S seconds for their stacks."""
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
    """Send SIGKILL to the process group of every rank that still runs, and delete empty stack files.

    Call it last: a rank that still has state to save would lose it.
    """
    with handling(lambda *_: None):  # a second Ctrl-C must not leave ranks running
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        for rank in range(len(ranks)):
            discard_if_empty(stacks_path(folder / "logs", rank))
