"""The commands of the README and of docs/, and the promises of the README about the first one."""

import json
import math
import re
import resource
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins

from benchmarks.report import make_sweep
from hydra_plugins.runner_sweeps import local
from runner.sweeps.local_jobs import LocalJob
from tests.e2e.commands import EXPORTING, SMALL, call_here, command, newest, rows, run_command, run_forked
from tests.patience import patience

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = "\n".join(page.read_text() for page in PAGES)
OPTIMIZERS = (ROOT / "docs" / "optimizers.md").read_text()
LOSSES = (ROOT / "docs" / "losses.md").read_text()
COMMAND = re.compile(r"^(?:\$ )?((?:python -m runner|torchrun) .*?)(?:  +#.*)?$", re.MULTILINE)
COMMANDS = sorted(set(COMMAND.findall(DOCS)))
SWEEPS = [text for text in COMMANDS if re.search(r" -m runner .*(-m |sweep=)", text)]
SAID = ("run folder", "checkpoint", "train loss", "eval loss", "tokens/s", "export", "completion")
PAIRS = [
    {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {n}."} for n in range(8)
]


def test_the_default_run(tmp_path: Path) -> None:
    """``python -m runner`` takes at least 100 steps in a few minutes of one core, and it learns.

    Processor time is measured, because other tests run at the same time.
    """
    began = children_seconds()
    answer = run_command(command(), cwd=tmp_path, seconds=150)
    assert answer.returncode == 0, answer.stderr
    assert children_seconds() - began < patience(60)
    run = newest(tmp_path / "outputs")
    losses = [row["train/loss"] for row in rows(run, "train/loss")]
    assert len(losses) >= 100
    assert losses[-1] < losses[0] - 2.5
    assert rows(run, "eval/loss")[-1]["eval/loss"] < losses[0] - 2.5
    for words in SAID:
        assert words in answer.stdout


def test_what_the_default_run_says(tmp_path: Path) -> None:
    """The output is complete, also with a few steps of a small model."""
    answer = run_forked(*EXPORTING, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for words in SAID:
        assert words in answer.stdout


def children_seconds() -> float:
    """Return the processor seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("text", [text for text in COMMANDS if text not in SWEEPS])
def test_a_command_of_the_readme_composes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All groups, options and keys of the command exist; ``--cfg job`` replaces the run."""
    words = shlex.split(text)
    arguments = words[words.index("runner") + 1 :]
    shown = [] if {"--help", "--cfg"} & set(arguments) else ["--cfg", "job"]
    GlobalHydra.instance().clear()
    code, wrong = call_here(*arguments, *shown), "learning_rate" in text
    said = capsys.readouterr()
    assert code == (2 if wrong else 0), said.err
    if wrong:
        assert "nothing reads this key; use optimizer.lr for TRL" in said.err
    else:
        assert ("Groups (group=option)" if "--help" in arguments else "run:") in said.out


@pytest.mark.parametrize("text", [text for text in SWEEPS if "launcher=slurm" not in text])
def test_a_sweep_of_the_readme_sweeps(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations of all jobs compose. No job is run."""
    numbers: list[int] = []
    Plugins.instance()  # imports the launchers
    monkeypatch.setattr(
        "runner.launch.run.run", lambda *given: numbers.append(given[1].sweep_job.number) or 1.0
    )
    monkeypatch.setattr(local, "run_jobs", lambda jobs, _: [pretend(job, numbers) for job in jobs])
    monkeypatch.chdir(tmp_path)
    assert call_here(*shlex.split(text)[3:]) == 0
    assert len(numbers) == len(set(numbers)) > 2


@pytest.mark.parametrize("text", [text for text in SWEEPS if "launcher=slurm" in text])
def test_a_sweep_on_slurm_would_be_submitted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call_here(*shlex.split(text)[3:], "hydra.launcher.dry_run=true") == 0
    assert "nothing was submitted" in capsys.readouterr().out


def pretend(job: LocalJob, numbers: list[int]) -> None:
    numbers.append(job.sweep_job.number)
    job.sweep_job.mark_running()
    job.sweep_job.finish("completed", loss=1.0, seconds=0.0)


def test_reports_are_written_as_shown(tmp_path: Path) -> None:
    """Reports of a sweep and of a run are written with the names in the README."""
    stamp = make_sweep(tmp_path / "outputs", runs=2, steps=20).rename(tmp_path / "outputs/sweeps/STAMP")
    (tmp_path / "outputs/sft_tiny").mkdir()
    (tmp_path / "outputs/sft_tiny/STAMP").symlink_to(tmp_path / "outputs/pt_tiny/stamp_0000")
    found = set(re.findall(r"^python -m (runner\.report outputs/.*)$", DOCS, flags=re.MULTILINE))
    commands = {text for text in found if "--watch" not in text}  # which does not end by itself
    assert len(commands) == 2
    for text in commands:
        answer = run_command([sys.executable, "-m", *shlex.split(text)], cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    assert (stamp / "report.html").stat().st_size > (tmp_path / "run.html").stat().st_size > 10_000


def test_a_refusal_reads_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command_line, message) = re.findall(r"^\$ python -m runner (.*parallelism.*)\n(error: .*)$", DOCS, re.M)[
        0
    ]
    assert call_here(*shlex.split(command_line), f"run.output_dir={tmp_path}") == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_an_optimizer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/optimizers.md train, the last one with its file."""
    (source,) = re.findall(r"```python\n(.*?)```", OPTIMIZERS, flags=re.DOTALL)
    (tmp_path / "my_optimizers.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    commands = re.findall(r"^python -m runner (.*)$", OPTIMIZERS, flags=re.MULTILINE)
    assert len(commands) == 8
    for number, command_line in enumerate(commands):
        words = [word for word in shlex.split(command_line) if not word.startswith("parallelism=")]
        assert call_here(*words, *SMALL, f"run.output_dir={tmp_path}/{number}") == 0
        losses = [row["train/loss"] for row in rows(newest(tmp_path / str(number)), "train/loss")]
        assert len(losses) == 4
        assert losses[-1] < losses[0]


def test_a_preference_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second example of docs/losses.md trains with its YAML file."""
    _, source = re.findall(r"```python\n(.*?)```", LOSSES, flags=re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", LOSSES, flags=re.DOTALL)
    (tmp_path / "conf/stage").mkdir(parents=True)
    (tmp_path / "conf/stage/cal_dpo.yaml").write_text(config)
    (tmp_path / "my_preferences.py").write_text(source)
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["data=files", f"data.train={tmp_path}/pairs.jsonl", f"data.cache_dir={tmp_path}/cache"]
    chosen = [f"--config-dir={tmp_path}/conf", "stage=cal_dpo"]
    assert call_here(*chosen, *SMALL, *data, f"run.output_dir={tmp_path}/out") == 0
    found = rows(newest(tmp_path / "out"), "train/loss")
    assert len(found) == 4
    # While policy and reference are equal, the loss is log 2 and the squares of two targets of 5.
    assert found[0]["train/loss"] == pytest.approx(math.log(2) + 0.5 * 2 * 25, rel=1e-6)
    assert found[-1]["train/loss"] < found[0]["train/loss"]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
