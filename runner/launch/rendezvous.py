"""Agreement on one run folder if torchrun or srun started the ranks.

Rank 0 prepares the run while the other ranks wait at a key-value store instead of a collective, which could
time out during tokenisation. On each further node the first local rank repeats the preparation of the data:
it finds the cache if the filesystem is shared, and builds it otherwise.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from components.contracts.errors import MISTAKE, ConfigError
from components.rank_info import RankInfo

PATIENCE = timedelta(days=2)
"""Time limit for the wait of the other ranks while the data is tokenised."""
LOOPBACK = "127.0.0.1"
T = TypeVar("T")


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


def agree_on_folder(
    store: dist.Store,
    environ: Mapping[str, str],
    prepare: Callable[[], Path],
    prepare_data: Callable[[], object],
) -> Path:
    """Call ``prepare`` on rank 0 and ``prepare_data`` on the first rank of every other node.

    Every rank calls this function, which returns the folder that ``prepare`` returned on rank 0. On rank 0,
    errors of ``prepare`` are raised again.

    Raises:
        ConfigError: if the folder does not exist on this node.
        SystemExit: with code MISTAKE, if ``prepare`` failed on rank 0, or ``prepare_data`` on the first rank
            of this node.
    """
    place = RankInfo.read(environ)
    round_key = f"{place.attempt}/runner"
    if place.rank == 0:
        return publish(store, round_key, prepare)
    answer = receive(store, round_key)
    if "error" in answer:
        raise SystemExit(MISTAKE)
    if place.node:
        node_key = f"{round_key}/node/{place.node}"
        if place.local_rank == 0:
            publish(store, node_key, prepare_data)
        elif "error" in receive(store, node_key):
            raise SystemExit(MISTAKE)
    folder = Path(answer["folder"])
    if not folder.is_dir():
        raise ConfigError(f"run.output_dir: this node does not see {folder}; put it on a shared filesystem.")
    return folder


def publish(store: dist.Store, key: str, prepare: Callable[[], T]) -> T:
    """Return the result of ``prepare``. Under ``key``, write the result if it is a folder, or the error."""
    try:
        found = prepare()
    except BaseException as error:
        store.set(key, json.dumps({"error": str(error)}))
        raise
    store.set(key, json.dumps({"folder": str(found)} if isinstance(found, Path) else {}))
    return found


def receive(store: dist.Store, key: str) -> dict[str, str]:
    store.wait([key], PATIENCE)
    return json.loads(store.get(key))
