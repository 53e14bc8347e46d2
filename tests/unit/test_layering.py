"""The imports that are allowed between modules, and the names that the runner must not contain."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = sorted((ROOT / "runner").rglob("*.py"))
COMPONENTS = sorted((ROOT / "components").rglob("*.py"))
PLUGINS = sorted((ROOT / "hydra_plugins").rglob("*.py"))
HYDRA = {
    "runner/cli.py",
    "runner/command_mistakes.py",
    "runner/conf_folder.py",
    "runner/config/instantiate.py",
}
USERS_WORDS = ("runner/records/renamed_keys.py", "runner/commands/import")
"""Beginnings of the paths of files that list options of other tools or former keys, as users write them."""
CONCRETE = {"engines", "losses", "data", "models", "optimizers", "schedulers", "adapters"}

LAYERS = (
    "components.contracts",
    "components.accelerator components.atomic_write components.checksum components.home components.json_text "
    "components.rank_info components.rounding components.run_exports components.yaml_text "
    "runner.distribution runner.garbage_collection runner.search_path runner.standard_streams",
    "components.data components.models components.losses components.optimizers components.schedulers "
    "components.loggers components.checkpoint components.report",
    "components.adapters components.reference components.targets",
    "components.checkpoint.to_hf",
    "components.hooks",
    "components.engines.shared",
    "components.engines",
    "components.preflight",
    "components.rehearsal components.proof",
    "runner.logging_setup runner.signals runner.records",
    "runner.config",
    "runner.training",
    "runner.launch",
    "runner.sweeps runner.cli runner.command_mistakes runner.conf_folder",
    "runner.api runner.commands runner.chat runner.evaluate runner.export runner.generate "
    "runner.import_config runner.report "
    "runner.__main__ hydra_plugins",
)
"""Modules may import from their own line and the lines above; the longest matching name decides the line."""


def rank(module: str) -> int:
    """Return the number of the line of ``LAYERS`` that a module belongs to."""
    fits = [
        (len(name), number)
        for number, line in enumerate(LAYERS)
        for name in line.split()
        if f"{module}.".startswith(f"{name}.")
    ]
    assert fits, f"{module} is in no line of LAYERS"
    return max(fits)[1]


def imports(path: Path, *, at_import: bool = False, for_types: bool = False) -> Iterator[str]:
    """Yield the dotted names of all imports.

    ``at_import`` leaves out imports in functions and for type checkers; ``for_types`` only the former.
    """
    tree = ast.parse(path.read_text())
    later = {
        id(node)
        for part in ast.walk(tree)
        if (at_import or for_types) and is_later(part, for_types=for_types)
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_later(node: ast.AST, *, for_types: bool) -> bool:
    """Return whether a node is a function, or, unless ``for_types``, a block for type checkers only."""
    if isinstance(node, ast.If) and not for_types:
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in RUNNER + COMPONENTS + PLUGINS}


def ours(path: Path, *, for_types: bool = False) -> set[str]:
    """Return this project's modules that a file imports; an imported module replaces its package."""
    found = {imported for imported in imports(path, for_types=for_types) if imported in MODULES}
    longer = {module.rpartition(".")[0] for module in found}
    tree = ast.parse(path.read_text())
    named = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{alias.name}" not in MODULES for alias in node.names)
    }
    return {module for module in found if module not in longer or module in named} - {module_of(path)}


def test_nothing_imports_upwards() -> None:
    """No module imports one of a higher layer, not even in a function."""
    pairs = ((module, target) for module, path in MODULES.items() if "." in module for target in ours(path))
    assert {(module, target) for module, target in pairs if rank(target) > rank(module)} == set()


def test_no_circles() -> None:
    """No modules import each other in a cycle, not even for type checkers."""
    edges = {module: ours(path, for_types=True) for module, path in MODULES.items()}
    reached = {module: reachable(module, edges) for module in edges}
    circles = {frozenset(b for b in reached[a] if a in reached[b]) for a in edges if a in reached[a]}
    assert circles == set()


def reachable(module: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(edges[module])
    while todo:
        if (target := todo.pop()) not in found:
            found.add(target)
            todo += edges[target]
    return found


@pytest.mark.parametrize("path", COMPONENTS, ids=name)
def test_components_know_nothing_of_hydra(path: Path) -> None:
    assert not {imported.split(".")[0] for imported in imports(path)} & {"hydra", "omegaconf", "tests"}


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_imports_no_concrete_component(path: Path) -> None:
    for imported in imports(path):
        parts = imported.split(".")
        concrete = parts[0] == "components" and len(parts) > 1 and parts[1] in CONCRETE
        concrete = concrete and parts[2:3] != ["shared"]  # shared code of engines names no engine
        assert not concrete or name(path).startswith("runner/commands/"), imported
        if parts[0] in {"hydra", "omegaconf"}:
            assert name(path) in HYDRA, f"{imported} belongs into {sorted(HYDRA)}"


@pytest.mark.parametrize("path", RUNNER, ids=name)
def test_the_runner_names_no_engine_loss_or_adapter(path: Path) -> None:
    text = path.read_text().lower()
    for word in ("megatron", "fsdp", "dpo", "lora", "if rank"):
        if name(path).startswith(USERS_WORDS):
            continue
        assert not re.search(rf"(?<![a-z]){word}", text), word


@pytest.mark.parametrize("path", RUNNER + COMPONENTS, ids=name)
def test_megatron_stays_in_its_engine(path: Path) -> None:
    """Only modules in ``runtime``, which patches Megatron first, import it at module level."""
    if not name(path).startswith("components/engines/megatron/"):
        assert not any(is_megatron(imported) for imported in imports(path))
    elif "/runtime/" not in name(path):
        assert not any(is_megatron(imported) for imported in imports(path, at_import=True))


def is_megatron(imported: str) -> bool:
    runtime = "components.engines.megatron.runtime"
    return imported.split(".")[0] == "megatron" or imported.startswith(runtime)


def test_the_parent_imports_no_megatron_and_no_peft() -> None:
    """Composing, building and checking descriptions does not import these slow packages.

    A rank with Megatron, on the other hand, does not import wandb.
    """
    code = """
import sys, torch
from components.contracts.engine import EngineOptions
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from runner.config.instantiate import build_experiment
from runner.cli import config_dir
from runner.config.sources import ConfigSources
layout = ["parallelism=tp2pp2", "parallelism.pipeline_layout=Et*2|t*2L"]
with initialize_config_dir(config_dir(), version_base="1.3"):
    config = compose("config", [*layout, "run.name=x", "adapter=lora"])
experiment = build_experiment(OmegaConf.to_container(config, resolve=True), ConfigSources())
model = experiment.model.meta_model
options = EngineOptions(torch.float32, "cpu")
experiment.parallelism.check(model, experiment.optimizer, options, world_size=1)
experiment.adapter.check(model)
assert not {"megatron", "peft"} & {*sys.modules}
import components.engines.megatron.runtime.engine
assert "wandb" not in sys.modules
import wandb.sdk
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_the_command_line_imports_no_torch() -> None:
    code = "import sys, runner.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", PLUGINS, ids=name)
def test_plugins_cost_nothing_at_start(path: Path) -> None:
    """Plugins import nothing slow, because Hydra imports all of them, even for ``--help``."""
    for imported in imports(path, at_import=True):
        assert imported.startswith("components.contracts.errors") or imported.split(".")[0] not in {
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
