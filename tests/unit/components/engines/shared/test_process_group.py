"""The timeout of collectives when a peer is missing."""

import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from components.engines.shared import process_group


@pytest.mark.parametrize(("timeout_s", "expected_s"), [(0, 1800), (5, 1800), (4000, 4120)])
def test_it_waits_longer_than_the_watchdog_in_every_group(timeout_s: float, expected_s: float) -> None:
    process_group.init_process_group("cpu")
    try:
        another = dist.new_group([0], timeout=timedelta(seconds=7))
        process_group.set_timeouts(timeout_s)
        for group in (dist.group.WORLD, another):
            assert group is not None
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=expected_s)
    finally:
        process_group.destroy_process_group()


def test_a_restart_of_torchrun_does_not_count_the_groups_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first start, only rank 0 came to its group; torchrun keeps the store."""
    kept = dist.HashStore()
    joined: list[dist.Store] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: joined.append(store))

    def join(rank: int, restarts: int) -> dist.Store:
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(kept, rank, 2)]))
        process_group.init_process_group("cpu")
        return joined[-1]

    join(0, restarts=0).set("address", "of a process that has ended")
    mine, theirs = join(0, restarts=1), join(1, restarts=1)
    assert not theirs.check(["address"])
    mine.set("address", "of rank 0")
    assert theirs.get("address") == b"of rank 0"


def test_ranks_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        process_group.init_process_group("cpu")
        process_group.destroy_process_group()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_building_of_an_engine_has_other_timeouts_than_its_run() -> None:
    def timeout() -> timedelta:
        assert dist.group.WORLD is not None
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout

    try:
        with process_group.joined("cpu", 4000):
            assert timeout() != timedelta(seconds=4120)
        assert timeout() == timedelta(seconds=4120)
    finally:
        process_group.destroy_process_group()


def test_unused_gpu_memory_is_freed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: freed.append(dist.is_initialized()))
    process_group.init_process_group("cpu")
    process_group.destroy_process_group()
    assert freed == [False]
