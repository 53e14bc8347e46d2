"""Ranks come from SLURM's variables, and jobs are requeued; the tests need no installed SLURM."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from components.contracts.errors import ConfigError
from components.rank_info import first_host
from runner.cli import exit_code
from runner.launch import slurm_env
from runner.launch.restart import begun_by_this_job

TASK = {
    "SLURM_JOB_ID": "1917",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_the_last_of_five_ranks() -> None:
    found = slurm_env.ranks(TASK)
    port = int(found.pop("MASTER_PORT"))
    assert 10_000 <= port < 30_000
    assert found == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "gpu07",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    "other",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},  # set by torchrun
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
    ],
)
def test_other_processes_are_left_alone(other: dict[str, str]) -> None:
    merged = {name: value for name, value in (TASK | other).items() if value}
    assert slurm_env.ranks(merged) == {}


def test_what_the_user_says_stays() -> None:
    own = {"MASTER_ADDR": "ib0", "MASTER_PORT": "2222", "OMP_NUM_THREADS": "4", "SLURM_CPUS_PER_TASK": "8"}
    assert slurm_env.ranks(TASK | own).items() >= {k: v for k, v in own.items() if k[:5] != "SLURM"}.items()


def test_jobs_and_steps_that_share_a_node_meet_at_ports_of_their_own() -> None:
    places = [{"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s)} for j in range(1900, 2000) for s in range(9)]
    assert len({slurm_env.ranks(TASK | place)["MASTER_PORT"] for place in places}) == len(places)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("a,b", "a"),
        ("r[2-3]n[04-09]", "r2n04"),
        ("x[7,9]-ib.cluster", "x7-ib.cluster"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


ARRAY = {
    "SLURM_JOB_ID": "20",
    "SLURM_ARRAY_JOB_ID": "17",
    "SLURM_ARRAY_TASK_ID": "3",
    slurm_env.MAX_REQUEUES: "2",
}


@dataclass
class Scontrol:
    """A fake scontrol for a job in ``state``."""

    state: str = "RUNNING"
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str]":
        self.asked.append(words)
        return subprocess.CompletedProcess(words, 0, f"JobId=20 JobState={self.state} Reason=None", "")


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    monkeypatch.setattr(slurm_env, "scontrol", replaced := Scontrol())
    return replaced


def test_a_task_of_an_array_speaks_for_itself_alone(scontrol: Scontrol) -> None:
    assert slurm_env.queue_again(ARRAY | {"SLURM_RESTART_COUNT": "1"})
    assert scontrol.asked == [("show", "job", "--oneliner", "17_3"), ("requeue", "17_3")]


@pytest.mark.parametrize(
    "other", [{"SLURM_RESTART_COUNT": "2"}, {slurm_env.MAX_REQUEUES: "0"}, {"SLURM_JOB_ID": ""}]
)
def test_enough_is_enough(scontrol: Scontrol, other: dict[str, str]) -> None:
    environ = {name: value for name, value in (ARRAY | other).items() if value}
    assert not slurm_env.queue_again(environ)
    assert scontrol.asked == []


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "COMPLETING"])
def test_a_cancelled_job_stays_cancelled(scontrol: Scontrol, state: str) -> None:
    scontrol.state = state
    assert not slurm_env.queue_again(ARRAY)
    assert len(scontrol.asked) == 1


def test_a_notice_before_there_is_anything_to_save(
    scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 requests the requeue, and the other ranks exit without failing the job."""
    for name, value in ARRAY.items():
        monkeypatch.setenv(name, value)
    assert exit_code(lambda: os.kill(os.getpid(), signal.SIGUSR2)) == 0
    monkeypatch.setenv("RANK", "1")
    assert exit_code(lambda: os.kill(os.getpid(), signal.SIGUSR2)) == 0
    assert len(scontrol.asked) == 2
    assert exit_code(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 130


def test_torchrun_forwards_the_notices_to_a_job_that_is_requeued() -> None:
    job = ARRAY | {slurm_env.TORCHRUN: "none", slurm_env.FORWARDED: "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
    with pytest.raises(ConfigError, match=r"RUNNER_MAX_REQUEUES: .* add torchrun --signals-to-handle="):
        slurm_env.check_forwarding(job)
    slurm_env.check_forwarding(job | {slurm_env.FORWARDED: "SIGTERM, SIGUSR1, SIGUSR2"})
    slurm_env.check_forwarding(job | {slurm_env.MAX_REQUEUES: "0"})
    slurm_env.check_forwarding(ARRAY)


def test_the_folder_of_an_earlier_start(tmp_path: Path) -> None:
    command, again = ["runner", "stage=pt"], ARRAY | {"SLURM_RESTART_COUNT": "1"}
    ours = "2026-01-01_00-00-02"
    for name, job, words in (
        ("2026-01-01_00-00-01", "17_2", command),
        (ours, "17_3", command),
        (f"{ours}_copy", "17_3", command),
        ("2026-01-01_00-00-03", "17_3", ["runner", "stage=sft"]),
        ("2026-01-01_00-00-04", None, command),
        ("2026-01-01_00-00-05", "17_3", 5),  # damaged
    ):
        (tmp_path / name).mkdir()
        facts = {"command": words, "slurm": None if job is None else {"job": job, "restarts": 0}}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    assert begun_by_this_job(tmp_path, command, again) == tmp_path / ours
    assert begun_by_this_job(tmp_path, command, again | {slurm_env.MAX_REQUEUES: str(10**6)}) is not None
    assert begun_by_this_job(tmp_path, command, ARRAY) is None
    assert begun_by_this_job(tmp_path, command, {}) is None
    for number in ("often", "²"):
        with pytest.raises(ConfigError, match=f"RUNNER_MAX_REQUEUES: is '{number}' in the environment"):
            begun_by_this_job(tmp_path, command, {slurm_env.MAX_REQUEUES: number})
