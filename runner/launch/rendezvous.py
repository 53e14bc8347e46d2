"""Agreement on one run folder if torchrun or srun started the ranks.

Rank 0 prepares the run while the other ranks wait at a key-value store instead of a collective, which could
time out during tokenisation. On each further node the first local rank repeats the preparation of the data:
it finds the cache if the filesystem is shared, and builds it otherwise.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from components.contracts.errors import MISTAKE, ConfigError
from components.rank_info import RankInfo

PATIENCE = timedelta(days=2)
"""Time limit for the wait of ranks while others tokenise the data."""
ARRIVAL = timedelta(minutes=30)
"""Time limit for the wait of rank 0, after its preparation, for ranks that are still starting."""
FAREWELL = timedelta(minutes=1)
"""Time limit for the wait of rank 0, after an error, for ranks that do not know of it."""
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


def agree_on_folder(
    store: dist.Store,
    environ: Mapping[str, str],
    prepare: Callable[[], Path],
    prepare_data: Callable[[], object],
) -> Path:
    """Call ``prepare`` on rank 0 and then ``prepare_data`` on the first rank of every other node.

    Every rank calls this function, which returns the folder that ``prepare`` returned on rank 0 when every
    node is ready. On the rank where it occurs, an error is raised again.

    Raises:
        ConfigError: if the folder does not exist on this node; on rank 0, if another rank raised an error.
        SystemExit: on the other ranks, with code MISTAKE, if another rank raised an error.
    """
    round_key = f"runner/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    place = RankInfo.read(environ)
    with together(store, f"{round_key}/prepare", place, PATIENCE if place.rank else ARRIVAL):
        if place.rank == 0:
            store.set(f"{round_key}/folder", str(prepare()))
    folder = Path(store.get(f"{round_key}/folder").decode())
    with together(store, f"{round_key}/data", place, PATIENCE):
        if place.node and place.local_rank == 0:
            prepare_data()
        if not folder.is_dir():
            raise ConfigError(
                f"run.output_dir: this node does not see {folder}; put it on a shared filesystem."
            )
    return folder


@contextmanager
def together(store: dist.Store, key: str, place: RankInfo, patience: timedelta) -> Iterator[None]:
    """Wait at the end of the context until all ranks are there, or one of them has raised an error.

    Raises:
        ConfigError: on rank 0, if another rank raised an error.
        SystemExit: on the other ranks, with code MISTAKE, if another rank raised an error.
    """
    try:
        yield
    except BaseException as error:
        store.set(key, json.dumps({"error": f"node {place.node}: {error}"}))
        part(store, key, place)
        raise
    if store.add(f"{key}/arrived", 1) == place.world_size:
        store.set(key, "{}")
    store.wait([key], patience)
    answer = json.loads(store.get(key))
    if "error" in answer:
        part(store, key, place)
        raise ConfigError(answer["error"]) if place.rank == 0 else SystemExit(MISTAKE)


def part(store: dist.Store, key: str, place: RankInfo) -> None:
    """Note that this rank knows of an error; on rank 0, with which the store may end, wait until all do."""
    if store.add(f"{key}/told", 1) == place.world_size:
        store.set(f"{key}/all_told", "")
    if place.rank == 0:
        with suppress(dist.DistError):  # a rank may have ended before it came here
            store.wait([f"{key}/all_told"], FAREWELL)
