"""Who may import whom, and what the runner may not know."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = sorted((ROOT / "runner").rglob("*.py"))
COMPONENTS = sorted((ROOT / "components").rglob("*.py"))
ENGINES = [path for path in COMPONENTS if path.is_relative_to(ROOT / "components" / "engines")]
PLUGINS = sorted((ROOT / "hydra_plugins").rglob("*.py"))
HYDRA = {"runner/cli.py", "runner/build.py"}
CONTRACTS = {"config_contracts", "errors", "json_types", "protocols"}
CONCRETE = {"engines", "losses", "data", "models", "optimizers", "schedulers", "adapters"}


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Dotted names of every import; ``at_import``: of those that importing the module itself imports."""
    tree = ast.parse(path.read_text())
    later = {id(node) for part in ast.walk(tree) if at_import and is_later(part) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_later(node: ast.AST) -> bool:
    """A function, or what is for type checkers only."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", COMPONENTS, ids=name)
def test_components_know_only_the_contracts(path: Path) -> None:
    for imported in imports(path):
        top = imported.split(".")[0]
        assert top not in {"hydra", "omegaconf", "tests"}
        if top == "runner":
            assert imported.split(".")[1] in CONTRACTS | {"estimates"}, imported


FORECASTS = {"cost", "census", "estimate", "layouts", "shape"}
"""What preflight takes from below ``components/engines``: an engine can do without."""


@pytest.mark.parametrize("path", [p for p in ENGINES if p.stem not in FORECASTS], ids=name)
def test_engines_know_no_forecast(path: Path) -> None:
    for imported in imports(path):
        *_, last = imported.split(".")
        assert not imported.startswith("runner.estimates")
        assert last not in FORECASTS or not imported.startswith("components.engines."), imported


def test_engines_import_each_other_in_one_direction() -> None:
    """For type checkers too."""
    files = {name(path).removesuffix(".py").replace("/", "."): path for path in ENGINES}
    try:
        TopologicalSorter({file: set(imports(path)) & files.keys() for file, path in files.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_imports_no_concrete_component(path: Path) -> None:
    for imported in imports(path):
        parts = imported.split(".")
        concrete = parts[0] == "components" and len(parts) > 1 and parts[1] in CONCRETE
        assert not concrete or name(path) == "runner/export.py", imported  # a thin shell over one of them
        if parts[0] in {"hydra", "omegaconf"}:
            assert name(path) in HYDRA, f"{imported} belongs into {sorted(HYDRA)}"


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_names_no_engine_loss_or_adapter(path: Path) -> None:
    text = path.read_text().lower()
    for word in ("megatron", "fsdp", "dpo", "lora", "if rank"):
        assert not re.search(rf"(?<![a-z]){word}", text), word


@pytest.mark.parametrize("path", RUNNER + COMPONENTS, ids=name)
def test_megatron_stays_in_its_engine(path: Path) -> None:
    """And is imported with its module only below ``runtime``, which patches it first."""
    if not name(path).startswith("components/engines/megatron/"):
        assert not any(is_megatron(imported) for imported in imports(path))
    elif "/runtime/" not in name(path):
        assert not any(is_megatron(imported) for imported in imports(path, at_import=True))


def is_megatron(imported: str) -> bool:
    runtime = "components.engines.megatron.runtime"
    return imported.split(".")[0] == "megatron" or imported.startswith(runtime)


def test_the_parent_imports_no_megatron_and_no_peft() -> None:
    """Composing, building the descriptions and checking them takes none of the seconds that these take."""
    code = """
import sys, torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from runner.build import build_experiment
from runner.cli import config_dir
from runner.protocols import EngineOptions
from runner.provenance import Provenance
layout = ["parallelism=tp2pp2", "parallelism.pipeline_layout=Et*2|t*2L"]
with initialize_config_dir(config_dir(), version_base="1.3"):
    config = compose("config", [*layout, "run.name=x", "adapter=lora"])
experiment = build_experiment(OmegaConf.to_container(config, resolve=True), Provenance())
model = experiment.model.build(experiment.model.config())
options = EngineOptions(torch.float32, "cpu")
experiment.parallelism.check(model, experiment.optimizer, options, world_size=1)
experiment.adapter.check(model)
sys.exit("megatron" in sys.modules or "peft" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_the_command_line_imports_no_torch() -> None:
    code = "import sys, runner.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_plugins_cost_nothing_at_start(path: Path) -> None:
    """Hydra imports them all, for ``--help`` too."""
    for imported in imports(path, at_import=True):
        assert imported.split(".")[0] not in {
            "components",
            "megatron",
            "optuna",
            "submitit",
            "torch",
            "transformers",
        }


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name(path.parent).replace("/", ".") for path in RUNNER + COMPONENTS + PLUGINS}
    assert folders | {"runner.conf"} == set(listed)
