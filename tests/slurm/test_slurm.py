"""Sweeps and runs on a real SLURM cluster of two nodes."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.records.job_record import JobRecord
from tests.e2e.commands import SMALL, curve, newest, run_here, write_chats
from tests.patience import patience
from tests.slurm.cluster import NODES, Cluster, need_slurm
from tests.slurm.sweeps import ROOT, Sweep

FAULTY = ("parallelism=fsdp2", "parallelism._target_=tests.slurm.faulty.Faulty")
Words = tuple[str, ...]
TWO = "hydra.launcher.tasks_per_node=2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """Return the options of a run of a few seconds on a small data file."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    write_chats(path)
    data = ("data=files", f"data.train={path}")
    return (*SMALL, *data, *FAULTY, "run.micro_batch_size=1")


@pytest.fixture(scope="module")
def limited(cluster: Cluster, short: Words, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """Start a job of two ranks that exceeds its time limit, while other tests run.

    The job has one task, which starts the ranks itself. The limit is two minutes on an idle machine, and
    longer on a busy one, where the first step comes later.
    """
    minutes = round(patience(30) / 60)
    slow = ("parallelism.dp=2", "+parallelism.fault=slow", "+parallelism.step_s=1", "run.max_steps=3000")
    keys = (f"timeout_min={minutes}", "signal_delay_s=15", "max_requeues=1")
    limits = [f"hydra.launcher.{key}" for key in keys]
    with Sweep(cluster, tmp_path_factory.mktemp("limited") / "o", *short, *slow, *limits) as sweep:
        yield sweep


@pytest.fixture(scope="module")
def faults(
    cluster: Cluster, short: Words, limited: Sweep, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sweep]:
    """Run an array of jobs of two tasks: one completes, two fail, and one is cancelled in its third step."""
    swept = "+parallelism.fault=none,middle,late,hang"
    with Sweep(cluster, tmp_path_factory.mktemp("faults") / "o", *short, TWO, swept, typed=True) as sweep:
        sweep.until(lambda: sweep.steps_of(3) >= 2)
        cluster.run("scancel", sweep.id_of(3))
        assert sweep.end() == 1
        yield sweep


SHOW = """
import json, os
from runner.launch import slurm_env
print(json.dumps(slurm_env.ranks(os.environ)))
"""


def ranks_shown(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_tasks_of_srun_are_ranks(cluster: Cluster) -> None:
    shown = ranks_shown(cluster.run("srun", "-N2", "-n3", sys.executable, "-c", SHOW, cwd=ROOT))
    places = sorted((r["RANK"], r["GROUP_RANK"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"]) for r in shown)
    assert places == [("0", "0", "0", "2"), ("1", "0", "1", "2"), ("2", "1", "0", "1")]
    assert {(r["WORLD_SIZE"], r["MASTER_ADDR"]) for r in shown} == {("3", NODES[0])}
    assert len({r["MASTER_PORT"] for r in shown}) == 1


@pytest.mark.parametrize("how", ["salloc", "sbatch", "srun"])
def test_shells_scripts_and_lone_tasks_are_none(cluster: Cluster, tmp_path: Path, how: str) -> None:
    python = (sys.executable, "-c", SHOW)
    if how == "sbatch":
        script = tmp_path / "script"
        script.write_text(f"#!{sys.executable}{SHOW}")
        log = tmp_path / "log"
        cluster.run("sbatch", "--wait", "-N2", "-n4", f"--output={log}", str(script), cwd=ROOT)
        said = log.read_text()
    else:
        sizes = ["-N2", "-n4"] if how == "salloc" else ["-n1"]
        said = cluster.run(how, *sizes, *python, cwd=ROOT)
    assert ranks_shown(said) == [{}]


def outcome_of(sweep: Sweep, number: int) -> JobRecord:
    (found,) = (record for record in sweep.outcomes() if record.number == number)
    return found


def test_an_array(faults: Sweep) -> None:
    """Four jobs of one node and two ranks form one array, and each has its own record."""
    assert {faults.id_of(number).split("_")[1] for number in range(4)} == {"0", "1", "2", "3"}
    assert len({faults.id_of(number).split("_")[0] for number in range(4)}) == 1
    assert [outcome.status for outcome in faults.outcomes()] == ["completed", "failed", "failed", "failed"]
    well = outcome_of(faults, 0)
    assert well.loss is not None
    facts = json.loads((Path(str(well.folder)) / "run.json").read_text())
    assert facts["mesh"]["ranks"] == [[[[0]], [[1]]]]
    assert facts["slurm"] == {"job": faults.id_of(0), "restarts": 0}


@pytest.mark.parametrize(
    ("number", "words"), [(1, "the third step is a bad one"), (2, "after the last collective")]
)
def test_a_failed_rank_fails_its_job(faults: Sweep, number: int, words: str) -> None:
    """One failed rank is enough, and its traceback is shown in the output of the sweep."""
    error = str(outcome_of(faults, number).error)
    assert error.splitlines()[-1] == f"RuntimeError: {words}"
    assert "rank 1 failed:\nTraceback (most recent call last):" in error
    assert f"job {number} failed; SLURM job {faults.id_of(number)}: FAILED" in faults.said()
    assert error in faults.said()


def test_a_job_cancelled_by_others_has_failed(faults: Sweep) -> None:
    assert f"SLURM job {faults.id_of(3)}: CANCELLED" in str(outcome_of(faults, 3).error)


def test_a_preempted_job_goes_on_in_its_folder(
    cluster: Cluster, short: Words, limited: Sweep, tmp_path: Path
) -> None:
    """A job on two nodes that a signal and a requeue stop is bitwise an uninterrupted run."""
    steps = "run.max_steps=12"
    straight = run_here(tmp_path / "straight", *short, steps, "parallelism.dp=2")
    shape = ("hydra.launcher.nodes=2", "+parallelism.fault=slow")
    with Sweep(cluster, tmp_path / "o", *short, *shape, steps) as sweep:
        sweep.until(lambda: sweep.steps_of(0) >= 2)
        cluster.run("scancel", "--signal=USR2", sweep.id_of(0))
        sweep.until(lambda: sweep.steps_of(0) >= 6)
        cluster.run("scontrol", "requeue", sweep.id_of(0))
        assert sweep.end() == 0
        (outcome,) = sweep.outcomes()
        assert outcome.status == "completed"
        preempted = Path(str(outcome.folder))
        assert len(list(sweep.folder.glob("*/*/run.json"))) == 1
        facts = json.loads((preempted / "run.json").read_text())
        assert facts["slurm"] == {"job": sweep.id_of(0), "restarts": 2}
        assert Path(facts["resumed_from"]).parent.parent == preempted
        assert facts["mesh"]["ranks"] == [[[[0]], [[1]]]]
        assert curve(preempted) == curve(straight)


def test_the_script_for_sbatch(cluster: Cluster, short: Words, faults: Sweep, tmp_path: Path) -> None:
    """A smaller examples/slurm.sbatch gives the curve of the same job of a sweep."""
    smaller = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--time=5")
    log, path = tmp_path / "log", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ("sbatch", "--wait", *smaller, f"--output={log}", "examples/slurm.sbatch", *short)
    cluster.run("env", path, *script, f"run.output_dir={tmp_path}", cwd=ROOT)
    run = newest(tmp_path)
    assert curve(run) == curve(Path(str(outcome_of(faults, 0).folder))), log.read_text()


def test_ctrl_c_cancels(cluster: Cluster, short: Words, limited: Sweep, tmp_path: Path) -> None:
    """Without a terminal for a question, Ctrl-C cancels all jobs."""
    held = "hydra.launcher.sbatch_args=[--hold]"
    with Sweep(cluster, tmp_path / "o", *short, "run.seed=1,2", held) as sweep:
        jobs = [sweep.id_of(number) for number in (0, 1)]
        sweep.process.send_signal(signal.SIGINT)
        assert sweep.end() == 130
        assert not {*jobs} & {*cluster.run("squeue", "--noheader", "--array", "--format=%i").split()}
        assert [outcome.status for outcome in sweep.outcomes()] == ["interrupted", "interrupted"]


def test_what_sbatch_refuses_is_a_mistake(
    cluster: Cluster, short: Words, limited: Sweep, tmp_path: Path
) -> None:
    with Sweep(cluster, tmp_path / "o", *short, "hydra.launcher.partition=none_such") as sweep:
        assert sweep.end() == 2
        assert "error: hydra.launcher: sbatch refuses: " in sweep.said()
        assert "invalid partition" in sweep.said()


def test_jobs_of_different_layouts(cluster: Cluster, short: Words, limited: Sweep, tmp_path: Path) -> None:
    """Single tasks start the ranks of their layouts, and a refused point is not submitted."""
    points = "parallelism=single,pp2,pp2vpp2"  # the model has too few layers for the last one
    words = (*(word for word in short if word not in FAULTY), "run.max_steps=2")
    with Sweep(cluster, tmp_path / "o", *words, points, "hydra.launcher.array_parallelism=2") as sweep:
        assert sweep.end() == 2
        records = sorted(sweep.outcomes(), key=lambda record: record.number)
        assert [record.status for record in records] == ["completed", "completed", "invalid"]
        assert records[1].loss == pytest.approx(records[0].loss, rel=1e-5)
        assert records[2].folder is None
        assert "jobs submitted: 2" in sweep.said()
        assert "2 completed, 1 invalid" in sweep.said()
        assert "invalid: parallelism.vpp" in sweep.said()


def test_a_job_whose_time_is_up(limited: Sweep) -> None:
    """The job saves a checkpoint, is requeued up to the limit, and resumes each time."""
    assert limited.end(200) == 1
    (outcome,) = limited.outcomes()
    folder = Path(str(outcome.folder))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["slurm"] == {"job": limited.id_of(0), "restarts": 1}
    first, second = step_of(facts["resumed_from"]), facts["stopped"]["step"]
    assert 0 < first < second < 3000
    assert facts["stopped"]["reason"] == "SIGUSR2"
    assert [row["step"] for row in curve(folder)] == list(range(1, second + 1))
    assert outcome.status == "failed"
    assert f"checkpoint.resume={folder}" in str(outcome.error)


def step_of(checkpoint: Any) -> int:
    return int(Path(checkpoint).name.removeprefix("step_"))
