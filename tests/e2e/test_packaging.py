"""The wheel is complete: it runs in any folder without the checkout."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.commands import write_chats

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.architecture.num_hidden_layers=1",
    "run.max_steps=2",
    "data.max_samples=64",
    "data.max_eval_samples=8",
    "data.max_length=64",
    "run.device=cpu",
)
MY_LOSS = """
from components.losses import NextToken


class Mine(NextToken):
    pass
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment and return the folder of its programs."""
    folder = tmp_path_factory.mktemp("wheel")
    wheels, source = folder / "wheels", folder / "source"
    # The wheel is built from a copy, because old files in the build folder would be in the next wheel.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "outputs", "build", "tests"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("samecurve-*.whl")
    # Only the program comes from the wheel. Its dependencies are those of this environment.
    venv.create(folder / "venv", with_pip=False, system_site_packages=False)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python3*/site-packages"))
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--quiet"]
    subprocess.run([*install, str(wheel)], check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(here + "\n")
    return python.parent


def answer_of(command: list[object], folder: Path) -> str:
    """Run a command that must succeed, and return its standard output."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_empty_folder(programs: Path, tmp_path: Path) -> None:
    answer_of([programs / "samecurve", *SMALL], tmp_path)
    (export,) = tmp_path.glob("outputs/sft_tiny/*/export")
    assert (export / "tokenizer.json").exists()
    answer_of([programs / "python", "-m", "runner.report", export.parent], tmp_path)
    assert (export.parent / "report.html").stat().st_size > 10_000
    code = "import runner, components; print(runner.__file__, components.__file__)"
    assert str(ROOT) not in answer_of([programs / "python", "-c", code], tmp_path)
    assert answer_of([programs / "samecurve", "--version"], tmp_path).startswith("samecurve ")
    assert answer_of([programs / "python", "-m", "runner", "--version"], tmp_path).startswith("samecurve ")


def test_a_folder_with_packages_called_as_ours(programs: Path, tmp_path: Path) -> None:
    """The command, its job and its ranks do not import the user's packages with our names."""
    (tmp_path / "components").mkdir()
    for name in ("components/__init__.py", "runner.py"):
        (tmp_path / name).write_text(f"raise ValueError('{name} of the user')")
    (tmp_path / "my_loss.py").write_text(MY_LOSS)
    write_chats(tmp_path / "chats.jsonl")
    data = ("data=files", "data.train=chats.jsonl", "data.max_eval_samples=null")
    ranks = ("parallelism=fsdp2", "parallelism.dp=2", "run.export=false")
    jobs = ("-m", "hydra/launcher=local", "run.seed=1")
    command = [programs / "samecurve", *jobs, *SMALL, *data, *ranks, "stage._target_=my_loss.Mine"]
    answer_of(command, tmp_path)
    assert len([*tmp_path.glob("outputs/sft_tiny/*/logs/rank_1*")]) == 1
