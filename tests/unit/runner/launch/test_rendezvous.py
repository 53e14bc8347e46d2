"""The interfaces on which the ranks' store listens, and what ranks learn through it."""

import itertools
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
import torch.distributed as dist

from components.contracts.errors import MISTAKE, ConfigError, TrainingError
from runner.launch import rendezvous, spawn
from runner.launch.rendezvous import agree_on_folder, connect, host_loopback_store, prepare_nodes
from tests.patience import patience
from tests.slurm.cluster import free_ports

LOCAL = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
NODES = {"MASTER_ADDR": "127.0.0.1"}


def addresses(port: int) -> set[str]:
    """The addresses at which this process listens on ``port``."""
    found = psutil.Process().net_connections("tcp")
    return {at.laddr.ip for at in found if at.status == psutil.CONN_LISTEN and at.laddr.port == port}


def test_the_store_of_a_parent_is_on_the_loopback_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    ports: list[int] = []

    def rank(_folder: Path, _rank: int, _size: int, port: int, _output: object) -> object:
        assert addresses(port) == {"127.0.0.1"}
        ports.append(port)
        raise KeyboardInterrupt

    monkeypatch.setattr(spawn, "start_rank", rank)
    with pytest.raises(KeyboardInterrupt):
        spawn.run_workers(tmp_path, 2)
    assert ports
    assert addresses(ports[0]) == set(), "the socket is closed with the store"


@pytest.mark.parametrize("fails", [None, "rank 0", "node 1"])
def test_all_ranks_learn_of_an_error_before_they_join(tmp_path: Path, fails: str | None) -> None:
    store, words = dist.HashStore(), "data.train: no such file"

    def prepare(part: str) -> Path:
        if part == fails:
            raise ConfigError(words)
        return tmp_path

    def rank(number: int) -> object:
        place = {"RANK": number, "WORLD_SIZE": 4, "LOCAL_RANK": number % 2, "GROUP_RANK": number // 2}
        environ = {key: str(value) for key, value in place.items()}
        try:
            folder = agree_on_folder(store, environ, partial(prepare, "rank 0"))
            prepare_nodes(store, environ, folder, partial(prepare, "node 1"))
        except SystemExit as ended:
            return ended.code
        except ConfigError as error:
            return str(error)
        return folder

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rank, range(4)))
    expected: dict[str | None, list[object]] = {
        None: [tmp_path] * 4,
        "rank 0": [words, MISTAKE, MISTAKE, MISTAKE],
        "node 1": [f"node 1: {words}", MISTAKE, words, MISTAKE],
    }
    assert found == expected[fails]


def test_no_rank_waits_longer_than_another_one_prepares_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has waited twice for its time limit before the other node is ready."""
    store, expired = host_loopback_store(), threading.Event()
    further = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    beats, numbers = "0_of_2/ready/beats", itertools.count()

    def wait(keys: list[str], limit: timedelta) -> None:
        store.wait([beats], timedelta(seconds=patience(5)))
        number, before = next(numbers), store.add(beats, 0)
        if number == 2:
            expired.set()
            store.wait(keys, limit)
            return
        while store.add(beats, 0) == before:
            pass
        raise dist.DistStoreError("wait timeout")

    def prepare_data() -> None:
        assert expired.wait(patience(10))

    monkeypatch.setattr(rendezvous, "BEAT_S", 0.01)
    first = MagicMock(wraps=store, wait=wait)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            prepare_nodes, further, place | {"RANK": "1", "GROUP_RANK": "1"}, tmp_path, prepare_data
        )
        prepare_nodes(first, place | {"RANK": "0"}, tmp_path, pytest.fail)
        other.result()


def test_a_node_that_has_died_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE", timedelta(milliseconds=1))
    with pytest.raises(TrainingError, match="look at the output of the other nodes"):
        prepare_nodes(dist.HashStore(), LOCAL, tmp_path, pytest.fail)


def test_a_store_serves_clients() -> None:
    store = host_loopback_store()
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("changes", "local"),
    [
        ({"MASTER_ADDR": "10.1.2.3"}, True),
        (NODES | {"LOCAL_WORLD_SIZE": "1"}, False),
        (NODES | {"LOCAL_WORLD_SIZE": ""}, False),
    ],
    ids=["one node", "two nodes", "unknown"],
)
def test_ranks_of_one_machine_meet_on_its_loopback_interface(
    changes: Mapping[str, str], local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = LOCAL | {"MASTER_PORT": str(free_ports(1)[0])} | changes
    environ = {key: value for key, value in given.items() if value}
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store = connect(environ)
    assert (addresses(store.port) == {"127.0.0.1"}) is local
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    client = connect(environ | {"RANK": "1", "LOCAL_RANK": "1"})
    client.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("nodes", [{}, NODES | {"LOCAL_WORLD_SIZE": "1"}], ids=["one node", "two nodes"])
def test_a_port_that_is_taken_is_named(nodes: Mapping[str, str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^MASTER_PORT={port}: .*; set MASTER_PORT to a port that is"):
            connect(LOCAL | {"MASTER_PORT": str(port)} | nodes)


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("The client socket has timed out")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR=10\.1\.2\.3, MASTER_PORT=29500: rank 0 does not answer"
    ):
        connect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.1.2.3"})
