"""Gloo ranks that run many cases, forked from a process that has imported everything."""

import atexit
import gc
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

from components.engines.shared.torch_private import clear_dtensor_caches
from runner.launch.rendezvous import host_loopback_store
from tests import budget
from tests.forkserver import Process, count_lines_for
from tests.patience import patience

LEAVING_S = 30.0
MOST_THREADS = 60
"""Number of threads of a rank above which it is replaced.

Process groups in torch's caches keep their threads, which use processor time.
"""


class Rank:
    """One process and the pipe through which it gets work."""

    def __init__(self, number: int, kind: str) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            key = bytes(current_process().authkey)  # processes need the same key to exchange tensors
            pipe = [theirs.fileno()]
            self.process = Process(serve, number, kind, key, descriptors=pipe, kind=kind)

    def close(self) -> None:
        """Let the process exit, or kill it if it does not exit within ``LEAVING_S`` seconds."""
        self.pipe.close()
        try:
            self.process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


_forked: defaultdict[str, list[Rank]] = defaultdict(list)
"""All ranks of this process by kind. Every `Ranks` uses the first ``world_size`` of them."""


class Ranks:
    """``world_size`` processes; ``run`` calls a module-level function on all of them.

    With ``megatron`` they have imported Megatron, as in a Megatron run. Other ranks must never import it.
    """

    def __init__(self, world_size: int, *, megatron: bool = False) -> None:
        self.world_size, self.kind = world_size, "megatron" if megatron else "plain"

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = 60, size: int | None = None
    ) -> list[Any]:
        """Return the results of ``function(*args)`` by rank.

        Each call has a new store, so that process groups do not read stale keys. ``seconds`` is a time limit
        that `patience` scales. ``size`` restricts the call to the first ``size`` ranks, which form the world.
        """
        budget.count("rank_calls")
        ranks, size = _forked[self.kind], size or self.world_size
        ranks += [Rank(number, self.kind) for number in range(len(ranks), size)]
        store = host_loopback_store()
        for rank in ranks[:size]:
            rank.pipe.send((store.port, size, sys.path, os.environ.get("PYTEST_CURRENT_TEST", "")))
            rank.pipe.send((function, args))
        deadline = time.monotonic() + patience(seconds)
        answers: dict[int, tuple[bool, Any, int]] = {}
        for number, rank in enumerate(ranks[:size]):
            if rank.pipe.poll(max(deadline - time.monotonic(), 0.1)):
                answers[number] = rank.pipe.recv()
        failed = [f"rank {number}:\n{text}" for number, (ok, text, _) in answers.items() if not ok]
        silent = set(range(size)) - answers.keys()
        if failed or silent or max(threads for _, _, threads in answers.values()) > MOST_THREADS:
            self.kill()  # the state of this case must not affect the next one
        assert not failed, "\n".join(failed)
        assert not silent, f"no answer from ranks {sorted(silent)}"
        return [answers[number][1] for number in range(size)]

    def kill(self) -> None:
        """Kill all ranks of this kind; the next case starts new ones."""
        for rank in _forked.pop(self.kind, []):
            rank.process.kill()


@atexit.register
def close_all() -> None:
    """Close all ranks before the session ends, because they save their coverage data when they exit."""
    for ranks in _forked.values():
        for rank in ranks:
            rank.close()
    _forked.clear()


def serve(descriptor: int, rank: int, kind: str, key: bytes) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if kind == "plain":
        # Groups connect when they are first used. A send of Megatron's pipelines would block until then.
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    current_process().authkey = key
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    while True:
        try:
            port, world_size, sys.path[:], test = pipe.recv()
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        count_lines_for(test)
        os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        try:
            ok, value = True, function(*args)
            assert kind == "megatron" or "megatron.core" not in sys.modules, "take Ranks(..., megatron=True)"
        except Exception:  # noqa: BLE001  the test prints it
            ok, value = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            clear_dtensor_caches()
            function = args = None
            gc.collect()
            gc.freeze()  # what is left are modules and caches: the next collections need not look at them
        pipe.send((ok, value, psutil.Process().num_threads()))
