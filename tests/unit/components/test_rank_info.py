"""Variables of a launcher that cannot be are refused by name."""

import os

import pytest

from components.contracts.errors import ConfigError
from components.rank_info import CORES, RankInfo, check_place, num_cores


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("RANK", "4"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "99999"),
    ],
)
def test_a_variable_out_of_its_range_is_named(name: str, value: str) -> None:
    whole = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankInfo.read(whole).rank == 3
    with pytest.raises(ConfigError, match=rf"{name}: is '{value}' in the environment; set it to"):
        RankInfo.read(whole | {name: value})


SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def test_a_task_of_srun_is_a_rank() -> None:
    place = RankInfo.from_slurm(SRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert place.master_addr == "n1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NUM_TASKS", "two"),
        ("SLURM_PROCID", "x"),
        ("SLURM_PROCID", "4"),
        ("SLURM_PROCID", None),
        ("SLURM_JOB_ID", "abc"),
        ("SLURM_STEP_TASKS_PER_NODE", ""),
        ("SLURM_STEP_TASKS_PER_NODE", None),
        ("MASTER_PORT", "0"),
    ],
)
def test_a_wrong_variable_of_srun_is_named(name: str, value: str | None) -> None:
    environ = SRUN | ({} if value is None else {name: value})
    if value is None:
        del environ[name]
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        RankInfo.from_slurm(environ)


def test_several_machines_need_the_number_of_ranks_on_each() -> None:
    known = {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE: is not set"):
        check_place(known)
    check_place(known | {"LOCAL_WORLD_SIZE": "8"})
    check_place(known | {"LOCAL_RANK": "8"})


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    monkeypatch.delenv(CORES, raising=False)
    assert num_cores() == 3
    monkeypatch.setenv(CORES, "2")
    assert num_cores() == 2
