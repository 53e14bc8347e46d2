"""A set of gloo ranks that stays up for many cases: the imports alone cost seconds a process."""

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

PRELOADED = ["runner.train", "components.engines.fsdp2.engine", "transformers.models.qwen3.modeling_qwen3"]


class Ranks:
    """``world_size`` processes; ``run`` calls a module-level function on all of them."""

    def __init__(self, world_size: int) -> None:
        # Forked from a process that has imported what all of them need: imports take seconds a process.
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120, size: int | None = None
    ) -> list[Any]:
        """What ``function(*args)`` returned, by rank. A new store each time: groups never meet stale keys.

        ``size``: on the first so many ranks, as a world of their own; None: on all.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = self.pipes[:size]
        for pipe in pipes:
            pipe.send((store.port, len(pipes), function, args))
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        for rank, pipe in enumerate(pipes):
            if pipe.poll(max(deadline - time.monotonic(), 0.1)):
                answers[rank] = pipe.recv()
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in answers.items() if not ok]
        silent = set(range(len(pipes))) - answers.keys()
        if silent:
            self.close()  # a late answer must not be taken for that of the next test
        assert not failed, "\n".join(failed)
        assert not silent, f"no answer from ranks {sorted(silent)}"
        return [answers[rank][1] for rank in range(len(pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(pipe: Connection, rank: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    while True:
        port, world_size, function, args = pipe.recv()
        os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        try:
            pipe.send((True, function(*args)))
        except Exception:  # noqa: BLE001  the test prints it
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
