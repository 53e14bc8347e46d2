"""Who may import whom, and what the runner may not know."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = sorted((ROOT / "runner").rglob("*.py"))
COMPONENTS = sorted((ROOT / "components").rglob("*.py"))
HYDRA = {"runner/cli.py", "runner/build.py"}
CONCRETE = {"engines", "losses", "data", "models", "optimizers", "schedulers", "adapters"}


def imports(path: Path) -> Iterator[str]:
    """Dotted names of every import, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", COMPONENTS, ids=name)
def test_components_know_only_the_contracts(path: Path) -> None:
    for imported in imports(path):
        top = imported.split(".")[0]
        assert top not in {"hydra", "omegaconf", "tests"}
        if top == "runner":
            assert imported.split(".")[1] in {"protocols", "errors"}, imported


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_imports_no_concrete_component(path: Path) -> None:
    for imported in imports(path):
        parts = imported.split(".")
        assert not (parts[0] == "components" and len(parts) > 1 and parts[1] in CONCRETE), imported
        if parts[0] in {"hydra", "omegaconf"}:
            assert name(path) in HYDRA, f"{imported} belongs into {sorted(HYDRA)}"


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_names_no_engine_loss_or_adapter(path: Path) -> None:
    text = path.read_text().lower()
    for word in ("megatron", "fsdp", "dpo", "lora", "if rank"):
        assert word not in text, word


@pytest.mark.parametrize("path", COMPONENTS, ids=name)
def test_megatron_stays_in_its_engine(path: Path) -> None:
    if "engines/megatron" not in name(path):
        assert not any(imported.split(".")[0] == "megatron" for imported in imports(path))


def test_importing_the_command_line_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, runner.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
