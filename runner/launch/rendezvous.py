"""Agreement on one run folder if torchrun or srun started the ranks.

Rank 0 prepares the run while the other ranks wait at a key-value store instead of a collective, which could
time out during tokenisation. On each further node the first local rank repeats the preparation of the data:
it finds the cache if the filesystem is shared, and builds it otherwise. No rank begins to train before every
node is ready.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from components.contracts.errors import FAILED, MISTAKE, ConfigError, TrainingError
from components.rank_info import RankInfo

PATIENCE = timedelta(days=2)
"""Time limit for the wait of the other ranks while the data is tokenised."""
SILENCE = timedelta(minutes=30)
"""Time limit for the wait of ranks for others of which none tokenises data."""
BEAT_S = 60.0
"""Seconds between two signs, to the ranks that wait, that a rank tokenises data."""
LOOPBACK = "127.0.0.1"


def host_loopback_store(port: int = 0) -> dist.TCPStore:
    """Host a store for processes on this machine only, at ``port`` or, if that is 0, at a free port."""
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    # Without this socket, which the store closes, it would listen on all network interfaces.
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect(environ: Mapping[str, str]) -> dist.TCPStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it if the launcher does not.

    Every rank calls this function and keeps a reference to the result, because the process group uses the
    same store. If all ranks are on one machine, the store that rank 0 hosts listens only on the loopback
    interface.

    Raises:
        ConfigError: if the store cannot listen at the port, or cannot be reached.
    """
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = RankInfo.read(environ)
    hosts = place.rank == 0 and not hosted
    # Without LOCAL_WORLD_SIZE there may be other nodes.
    local = not hosted and environ.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    address = LOOPBACK if local else place.master_addr
    try:
        if hosts and local:
            store = host_loopback_store(place.master_port)
        else:
            store = dist.TCPStore(address, place.master_port, is_master=hosts, wait_for_workers=False)
    except (OSError, dist.DistNetworkError) as error:
        at = f"MASTER_PORT={place.master_port}"
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{at}: this rank cannot listen there ({reason}); set MASTER_PORT to a port that is free."
            if hosts
            else f"MASTER_ADDR={address}, {at}: rank 0 does not answer ({reason}); set both to its address."
        ) from error
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": address}
    return store


def agree_on_folder(store: dist.Store, environ: Mapping[str, str], prepare: Callable[[], Path]) -> Path:
    """Call ``prepare`` on rank 0; return the folder that it returned on every rank.

    Every rank calls this function. On rank 0, errors of ``prepare`` are raised again.

    Raises:
        SystemExit: with code MISTAKE, if ``prepare`` failed on rank 0.
    """
    place = RankInfo.read(environ)
    key = f"{place.attempt}/folder"
    if place.rank == 0:
        with telling(store, key, place):
            folder = prepare()
        store.set(key, json.dumps({"folder": str(folder)}))
        return folder
    store.wait([key], PATIENCE)
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise SystemExit(MISTAKE)
    return Path(answer["folder"])


def prepare_nodes(
    store: dist.Store, environ: Mapping[str, str], folder: Path, prepare_data: Callable[[], object]
) -> None:
    """Call ``prepare_data`` on the first rank of every node except the first, and wait for all ranks.

    Every rank calls this function with the ``folder`` of ``agree_on_folder``. Without the wait, the other
    ranks would wait in a collective, which could time out. Errors of ``prepare_data`` are raised again.

    Raises:
        ConfigError: if the folder does not exist on this node; on rank 0, also if another rank raised one.
        SystemExit: on the other ranks, with the code of rank 0, if another rank failed here.
        TrainingError: if no rank has made progress for the time ``SILENCE``; on rank 0, also if another rank
            failed here with another error.
    """
    place = RankInfo.read(environ)
    key = f"{place.attempt}/ready"
    with telling(store, key, place):
        if place.node and place.local_rank == 0:
            with beating(store, f"{key}/beats"):
                prepare_data()
        if not folder.is_dir():
            raise ConfigError(
                f"run.output_dir: this node does not see {folder}; put it on a shared filesystem."
            )
    if store.add(f"{key}/ranks", 1) == place.world_size:
        store.set(key, "{}")
    wait_while_beating(store, key, f"{key}/beats")
    answer = json.loads(store.get(key))
    if "error" in answer:
        kind = ConfigError if answer["mistake"] else TrainingError
        raise (
            kind(answer["error"]) if place.rank == 0 else SystemExit(MISTAKE if answer["mistake"] else FAILED)
        )


@contextmanager
def telling(store: dist.Store, key: str, place: RankInfo) -> Iterator[None]:
    """If the context raises an error, write it to ``store`` under ``key``, for the other ranks."""
    try:
        yield
    except BaseException as error:
        words = str(error) or type(error).__name__
        answer = {"error": f"node {place.node}: {words}", "mistake": isinstance(error, ConfigError)}
        store.set(key, json.dumps(answer))
        raise


@contextmanager
def beating(store: dist.Store, key: str) -> Iterator[None]:
    """Increment the counter ``key`` every ``BEAT_S`` seconds until the context is left."""
    ended = threading.Event()

    def beat() -> None:
        with suppress(dist.DistError):  # rank 0 has ended; the main thread notices it, too
            while not ended.wait(BEAT_S):
                store.add(key, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_while_beating(store: dist.Store, key: str, beats: str) -> None:
    """Wait for ``key`` as long as the counter ``beats`` grows; raise TrainingError if it does not."""
    seen = 0
    while True:
        try:
            return store.wait([key], SILENCE)
        except dist.DistStoreError:
            before, seen = seen, store.add(beats, 0)
            if seen == before:
                raise TrainingError(
                    f"some ranks have not begun to train after {SILENCE}, and no node prepares data; look "
                    "at the output of the other nodes."
                ) from None
