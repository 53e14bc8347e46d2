"""The wheel carries everything: it runs from an empty folder, without the checkout."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_works_from_an_empty_folder(tmp_path: Path) -> None:
    wheels, source = tmp_path / "wheels", tmp_path / "source"
    # A copy: building leaves a folder behind, whose old files would end up in the next wheel.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "outputs", "build", "tests"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("runner-*.whl")
    # The dependencies come from this environment, the runner itself from the wheel alone.
    venv.create(tmp_path / "venv", with_pip=False, system_site_packages=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    (site / "dependencies.pth").write_text(here + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    small = [
        "model.architecture.num_hidden_layers=1",
        "run.max_steps=2",
        "data.max_length=64",
        "run.device=cpu",
    ]
    answer = subprocess.run(
        [python, "-m", "runner", *small], cwd=empty, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    (export,) = empty.glob("outputs/sft_tiny/*/export")
    assert (export / "tokenizer.json").exists()
    report = [python, "-m", "runner.report", str(export.parent)]
    subprocess.run(report, cwd=empty, capture_output=True, check=True)
    assert (export.parent / "report.html").stat().st_size > 10_000
    code = "import runner, components; print(runner.__file__, components.__file__)"
    where = subprocess.run([python, "-c", code], cwd=empty, capture_output=True, text=True, check=True).stdout
    assert str(ROOT) not in where
