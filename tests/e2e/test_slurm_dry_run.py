"""``hydra/launcher=slurm`` without SLURM: the scripts of a dry run, and refused options."""

import shutil
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from hydra_plugins.runner_sweeps.optuna_study import JOURNAL
from runner.records.job_record import JobRecord, SweepJob, read_job_records
from tests.e2e.commands import SMALL, call_here

ROOT = Path(__file__).parents[2]


def call(folder: Path, *words: str) -> int:
    GlobalHydra.instance().clear()
    return call_here("-m", *SMALL, f"run.output_dir={folder}", "hydra/launcher=slurm", *words)


KEYS = {
    "nodes=2": "--nodes=2",
    "tasks_per_node=4": "--ntasks-per-node=4",
    "gpus_per_node=4": "--gpus-per-node=4",
    "cpus_per_task=8": "--cpus-per-task=8",
    "mem_gb=12.5": "--mem=12800M",
    "timeout_min=90": "--time=90",
    "account=us": "--account=us",
    "partition=big": "--partition=big",
    "qos=high": "--qos=high",
    "constraint=a100": "--constraint=a100",
    "signal_delay_s=300": "--signal=USR2@300",
    "array_parallelism=1": "--array=0-1%1",
    "name=mine": "--job-name=mine",
    "sbatch_args=['--exclude=gpu07',--exclusive,--setup]": "--exclude=gpu07",
}


def test_the_script_is_shown_and_nothing_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    more = ("setup=[module load cuda]", "srun_args=['--cpu-bind=none']")
    keys = [f"hydra.launcher.{key}" for key in (*KEYS, *more)]
    batch = ("run.global_batch_size=8", "run.micro_batch_size=1", "parallelism=fsdp2")
    assert call(tmp_path, *batch, *keys, "optimizer.lr=1e-3,2e-3", "hydra.launcher.dry_run=true") == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    for flag in KEYS.values():
        assert f"#SBATCH {flag}" in lines
    for line in ("#SBATCH --exclusive", "#SBATCH --requeue", "export RUNNER_MAX_REQUEUES=3"):
        assert line in lines
    srun = next(line for line in lines if line.startswith("srun "))
    assert "--cpu-bind=none" in srun
    assert " -P -u -m submitit.core._submit " in srun
    assert lines.index("module load cuda") < lines.index(srun)
    assert "export NCCL_DEBUG=INFO" in lines
    assert "0123" not in said
    assert "8 ranks" in said
    assert "optimizer.lr=0.002" in lines[-2]
    assert lines[-1] == "nothing was submitted (hydra.launcher.dry_run=true); jobs: 2"
    (sweep,) = (tmp_path / "sweeps").iterdir()
    assert read_job_records(sweep) == []
    assert not (sweep / "slurm").exists()


def test_a_point_that_does_not_fit_takes_no_place_in_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("hydra.launcher.tasks_per_node=2", "hydra.launcher.dry_run=true", "run.micro_batch_size=1")
    layouts = ("parallelism=fsdp2,tp2pp2,tp2", "model.architecture.num_key_value_heads=1")
    assert call(tmp_path, *words, *layouts) == 2
    shown = capsys.readouterr()
    assert "nothing was submitted (hydra.launcher.dry_run=true); jobs: 1" in shown.out
    assert read_job_records(next((tmp_path / "sweeps").iterdir())) == [], "no job has begun"
    assert "WORLD_SIZE=2" in shown.err
    assert "parallelism.tp: 2 does not divide num_key_value_heads = 1" in shown.err


def test_a_dry_run_of_a_search_shows_one_script_and_makes_no_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = ("hydra/sweeper=optuna", "hydra.sweeper.study_name=s", "hydra.launcher.dry_run=true")
    for high in ("1e-2", "1e-1"):
        assert call(tmp_path, *search, f"optimizer.lr=interval(1e-5,{high})", "run.seed=1,2") == 0
        shown = capsys.readouterr().out
        assert shown.count("#!/bin/bash") == 1
        assert "optimizer.lr=1e-05" in shown
        assert "jobs: 1" in shown, "as many as are chosen at once"
    assert not (tmp_path / "sweeps" / "s" / JOURNAL).exists()


def test_a_dry_run_of_a_search_leaves_the_records_of_its_jobs(tmp_path: Path) -> None:
    done = JobRecord(0, ("optimizer.lr=1e-3",), "completed", loss=1.0)
    SweepJob(tmp_path / "sweeps" / "s", 0, ()).write(done)
    search = ("hydra/sweeper=optuna", "hydra.sweeper.study_name=s", "hydra.launcher.dry_run=true")
    assert call(tmp_path, *search, "run.seed=1,2", "run.global_batch_size=5") == 2
    assert read_job_records(tmp_path / "sweeps" / "s") == [done]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("nodes=0", "hydra.launcher.nodes: must be at least 1"),
        ("nodes=two", "hydra.launcher.nodes (the command line): "),
        ("max_requeues=-1", "hydra.launcher.max_requeues: must be a number of at least 0"),
        ("mem_gb=nan", "hydra.launcher.mem_gb: must be a number of at least 0, got nan"),
        ("gpus_per_node=-1", "hydra.launcher.gpus_per_node: must be a number of at least 0"),
        ("cpus_per_task=0", "hydra.launcher.cpus_per_task: must be at least 1"),
        ("signal_delay_s=3600", "hydra.launcher.signal_delay_s: 3600 s before the time limit of 60 min"),
        ("sbatch_args=[-x]", "hydra.launcher.sbatch_args: '-x' is not a long option"),
        ("sbatch_args=['--job-name=mine']", "--job-name=mine repeats hydra.launcher.name; set that key"),
        ("sbatch_args=['--nodes=2']", "--nodes=2 repeats hydra.launcher.nodes; set that key"),
        ("sbatch_args=['--nodes 2']", "--nodes 2 repeats hydra.launcher.nodes; set that key"),
        ("sbatch_args=['--no-requeue']", "--no-requeue repeats hydra.launcher.max_requeues; set that key"),
        ("tasks=2", "hydra.launcher.tasks"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, words: str) -> None:
    assert call(tmp_path, f"hydra.launcher.{key}") == 2
    assert words in capsys.readouterr().err


def test_only_a_single_task_has_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single task starts a rank for each of its GPUs. With several tasks, each is one rank."""
    words = ("hydra.launcher.dry_run=true", "hydra.launcher.gpus_per_node=8")
    assert call(tmp_path, *words) == 0
    assert call(tmp_path, *words, "hydra.launcher.nodes=2") == 2
    assert "hydra.launcher.tasks_per_node: each of the 2 tasks is one rank" in capsys.readouterr().err


def test_the_readme_shows_the_script_for_sbatch() -> None:
    script = (ROOT / "examples" / "slurm.sbatch").read_text()
    assert f"```bash\n{script}```" in (ROOT / "docs" / "slurm.md").read_text()


def test_no_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert call(tmp_path, "run.seed=1,2") == 2
    assert "hydra/launcher=slurm: srun is not installed here" in capsys.readouterr().err
