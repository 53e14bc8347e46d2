"""When ranks or their parent end early, no process is left and the run never succeeds silently."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from components.rank_info import RankInfo
from runner.launch.slurm_env import TORCHRUN
from tests.e2e.commands import ROOT, SMALL, Command, command, curve, left, newest, run_forked
from tests.patience import patience
from tests.slurm.cluster import free_ports

TWO = (*SMALL, "parallelism=fsdp2", "parallelism.dp=2", "run.micro_batch_size=1")
FAILS = "stage._target_=tests.e2e.losses.Fails"


def arguments(tmp_path: Path, how: str, rank: int = 1) -> list[str]:
    options = (f"+stage.how={how}", f"+stage.rank={rank}", f"+stage.ready={tmp_path / 'ready'}")
    return [*TWO, FAILS, *options, f"run.output_dir={tmp_path}"]


def start(tmp_path: Path, how: str, *more: str) -> tuple[Command, list[psutil.Process]]:
    """Start the command, wait until its rank 1 hangs in a step, and return it with its ranks."""
    started = Command(*arguments(tmp_path, how), *more, cwd=ROOT)
    started.until((tmp_path / "ready").exists)
    ranks = started.ranks()
    assert len(ranks) >= 2
    return started, ranks


def ignores_closed_pipes(process: psutil.Process) -> bool:
    """Tell whether a write to a peer that has ended raises an error instead of killing the process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(re.findall(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return bool(ignored >> (signal.SIGPIPE - 1) & 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", ["rank 1", "SystemExit: 3"]),
        ("kill", ["rank 1 was killed by SIGKILL"]),
        ("memory", ["rank 1: step 2: out of memory in micro-batch 1 of 2 (", ". Preflight estimated "]),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_own_words(tmp_path: Path, how: str, said: list[str]) -> None:
    answer = run_forked(*arguments(tmp_path, how), cwd=ROOT)
    assert answer.returncode == 1
    for words in said:
        assert words in answer.stderr


def test_a_second_signal_ends_what_a_hung_rank_holds_up(tmp_path: Path) -> None:
    started, ranks = start(tmp_path, "hang")
    started.process.send_signal(signal.SIGTERM)
    started.until(lambda: "SIGTERM: the run ends at" in started.stderr())
    started.process.send_signal(signal.SIGINT)
    answer = started.finish()
    assert answer.returncode == 130
    assert "nothing is left running" in answer.stderr
    assert not left(ranks)


def test_a_signal_to_the_parent_has_all_ranks_save(tmp_path: Path) -> None:
    started, ranks = start(tmp_path, "go on", "run.max_steps=100000", "checkpoint.save_every=0")
    started.process.send_signal(signal.SIGUSR1)
    answer = started.finish()
    assert answer.returncode == 0, answer.stderr
    run = newest(tmp_path)
    stopped = json.loads((run / "run.json").read_text())["stopped"]
    checkpoint = run / "checkpoints" / f"step_{stopped['step']:08d}"
    assert (checkpoint / "complete").exists()
    said = answer.stdout + answer.stderr
    assert f"stopped at step {stopped['step']} (SIGUSR1); resume with: python -m runner " in said
    assert f"checkpoint.resume={checkpoint}" in said
    assert not left(ranks)


def test_a_hung_rank_is_found_with_the_stacks_of_all(tmp_path: Path) -> None:
    limit = round(patience(1.5))
    answer = run_forked(*arguments(tmp_path, "hang"), f"run.hang_timeout_s={limit}", cwd=ROOT)
    assert answer.returncode == 1
    assert f"no progress for {limit} s (run.hang_timeout_s), since " in answer.stderr
    assert "in step 2" in answer.stderr
    logs = newest(tmp_path) / "logs"
    assert str(logs / "stacks_*.txt") in answer.stderr
    assert "in _fail" in (logs / "stacks_1.txt").read_text(), "the function that hangs"
    assert "in train_step" in (logs / "stacks_0.txt").read_text(), "the peer that waits for it"


def test_a_killed_rank_and_a_restart_make_the_same_curve(tmp_path: Path) -> None:
    more = ("run.max_restarts=1", "+stage.once=true", "+stage.at=7", "checkpoint.save_every=2")
    answer = run_forked(*arguments(tmp_path, "kill"), *more, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert "restart 1 of 1, from step 2: rank 1 was killed by SIGKILL" in answer.stderr
    run = newest(tmp_path)
    assert json.loads((run / "run.json").read_text())["restarts"] == 1
    once = run_forked(*TWO, f"run.output_dir={tmp_path / 'straight'}", cwd=ROOT)
    assert once.returncode == 0, once.stderr
    assert curve(run) == curve(newest(tmp_path / "straight"))


def test_killing_the_parent_leaves_nothing(tmp_path: Path) -> None:
    started, ranks = start(tmp_path, "hang")
    assert all(ignores_closed_pipes(rank) for rank in ranks), "as every interpreter does"
    started.process.kill()
    started.process.wait()
    assert not left(ranks)


def run_as_torchrun(*arguments: str) -> None:
    """Start the command as torchrun starts a rank: with its variables, in a session of its own."""
    place = RankInfo(master_port=free_ports(1)[0]).variables()
    cache = {"RUNNER_CACHE": os.environ["RUNNER_CACHE"] + "-whole"}  # of the whole embedded data
    environ = os.environ | place | cache | {TORCHRUN: "none"}
    subprocess.Popen(command(*arguments), env=environ, start_new_session=True).wait()


def test_killing_torchrun_leaves_nothing(tmp_path: Path) -> None:
    hangs = ("+stage.how=hang", "+stage.rank=0", f"+stage.ready={tmp_path / 'ready'}")
    words = (*SMALL, FAILS, *hangs, f"run.output_dir={tmp_path}")
    started = Command(*words, cwd=ROOT, call=run_as_torchrun)
    started.until((tmp_path / "ready").exists)
    ranks = started.ranks()
    assert ranks
    started.process.kill()
    assert not left(ranks)


def test_a_failure_on_one_rank_alone_has_a_traceback(tmp_path: Path) -> None:
    """A run of one rank, which runs in the process of the command, prints the traceback."""
    single = [*SMALL, FAILS, "+stage.rank=0", f"run.output_dir={tmp_path}"]
    answer = run_forked(*single, cwd=ROOT)
    assert answer.returncode == 1
    assert "RuntimeError: the third call is a bad one" in answer.stderr
