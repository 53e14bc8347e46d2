"""Nothing in the working directory hides the program, and a user's own modules there are found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.contracts.errors import MISTAKE
from runner import search_path
from runner.search_path import ROOT, ensure_own_packages, follow_parent, program_first, python_module

IMPORTS_ALL = """
from runner.search_path import program_first
program_first()
import runner, components.losses, my_loss, sys
print(components.__file__, runner.__file__, my_loss.__file__, sep="\\n")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with modules that have our names, and with a loss of the user."""
    (tmp_path / "components").mkdir()
    for name in ("components/__init__.py", "runner.py", "hydra_plugins.py"):
        (tmp_path / name).write_text(f"raise ValueError('{name} of the user')")
    (tmp_path / "my_loss.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "elsewhere", str(ROOT), "site-packages"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_the_working_directory_comes_last(folder: Path) -> None:
    for _ in range(2):
        program_first()
        assert sys.path == [str(ROOT), "elsewhere", "site-packages", str(folder)]
        assert os.environ["PYTHONPATH"] == str(ROOT)


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    with pytest.raises(SystemExit) as ended:
        program_first()
    assert ended.value.code == MISTAKE
    assert capsys.readouterr().err == (
        "error: the working directory was deleted; change to one that exists.\n"
    )


def test_the_path_of_the_user_stays_behind_the_checkout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    program_first()
    assert os.environ["PYTHONPATH"] == f"{ROOT}:{folder}"


def test_in_the_checkout_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", "site-packages"])
    program_first()
    assert sys.path == [str(ROOT), "site-packages"]


def test_what_is_installed_stays_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """site-packages is not moved, because before the standard library it could hide modules of it."""
    monkeypatch.setattr(search_path, "IS_INSTALLED", True)
    program_first()
    assert sys.path == ["elsewhere", str(ROOT), "site-packages", str(folder)]
    assert "PYTHONPATH" not in os.environ


def test_a_process_of_the_program_finds_its_own_packages(folder: Path) -> None:
    """A process imports none of the modules with our names in its working directory."""
    program_first()
    command = [*python_module("runner.launch.rank_main")[:-2], "-c", IMPORTS_ALL]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    components, runner, own = map(Path, found.stdout.split())
    assert (components.parents[1], runner.parents[1], own.parent) == (ROOT, ROOT, folder)


def test_a_rank_searches_the_folders_of_its_parent_last(folder: Path) -> None:
    """The working directory is one of them only if the parent searches it."""
    program_first()
    installed = [str(ROOT), "elsewhere", "site-packages"]
    follow_parent(["scripts", *installed, str(folder), "src"])
    assert sys.path == [*installed, "scripts", str(folder), "src"]
    follow_parent(["scripts", *installed])
    assert sys.path == [*installed, "scripts", "src"]


def test_every_process_is_started_so() -> None:
    """The sources contain no command that runs a module except `python_module` and that of sbatch."""
    for path in [*(ROOT / "runner").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]:
        if path.name not in {"search_path.py", "sbatch.py"}:
            assert not re.search(r'(sys\.executable|PYTHON)[^\]]*"-m"', path.read_text()), path


def test_a_package_called_as_ours_does_not_win(folder: Path) -> None:
    """The package of the user does not win in PYTHONPATH, nor in the first folder that Python searches."""
    (folder / "runner.py").unlink()
    code = "import runner, components, sys; print(components.__file__)"
    environ = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(ROOT / "components/__init__.py"), found.stderr


def test_one_that_still_wins_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = str(folder / "components/__init__.py")
    monkeypatch.setattr(search_path, "other_components", lambda: other)
    with pytest.raises(ImportError, match=f"finds {other} instead of {ROOT}/components; rename"):
        ensure_own_packages()
