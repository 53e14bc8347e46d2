"""The interfaces on which the ranks' store listens, and what ranks learn through it."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from components.contracts.errors import MISTAKE, ConfigError
from runner.launch import spawn
from runner.launch.rendezvous import agree_on_folder, connect, host_loopback_store

LOCAL = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
NODES = {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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


def test_an_error_of_a_further_node_ends_its_other_ranks() -> None:
    def fails() -> None:
        raise ConfigError("data.train: no such file")

    def agree(rank: int) -> None:
        here = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        here["GROUP_RANK"] = str(rank // 2)
        assert agree_on_folder(store, here, Path.cwd, fails) == Path.cwd()

    store = dist.HashStore()
    agree(0)
    with pytest.raises(ConfigError, match="no such file"):
        agree(2)
    with pytest.raises(SystemExit) as left:
        agree(3)
    assert left.value.code == MISTAKE
    agree(1)


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
    given = LOCAL | {"MASTER_PORT": str(free_port())} | changes
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
