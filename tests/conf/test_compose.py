"""Every option composes and builds, and the composed defaults equal the stored ones."""

import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from components.adapters.lora_config import LoRA
from components.contracts.errors import ConfigError
from components.preflight.search.layout_search import DEFAULTS
from components.schedulers import WSD
from runner.conf_folder import config_dir
from runner.config.command_line import single_job_overrides
from runner.config.instantiate import NAMED, build_component, build_experiment, build_named
from runner.config.sources import ConfigSources
from tests.e2e.commands import call_here, composed

CONF = Path(config_dir())
GOLDEN = Path(__file__).parent / "golden"
WHOLE = {"experiment", "sweep", "debug"}
"""Groups whose files override options of other groups."""
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in WHOLE
)
EXPERIMENTS = sorted(
    path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for path in (CONF / "experiment").rglob("*.yaml")
)
DEBUG = sorted(path.stem for path in (CONF / "debug").glob("*.yaml"))
SWEEPS = sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))
HOLDS_OUT = {
    "a file": (("data.train=a.jsonl",), 0.02),
    "two files": (("data.train=a.jsonl", "data.eval=b.jsonl"), 0.0),
    "a split of the hub": (("data.train=hub:a/b", "data.eval_split=test"), 0.0),
    "dataset_info": (("data=llamafactory", "data.dataset_info=d", "data.dataset=a"), 0.02),
    "both of dataset_info": (
        ("data=llamafactory", "data.dataset_info=d", "data.dataset=a", "data.eval_dataset=b"),
        0.0,
    ),
}
HYDRA = ["help/runner.yaml", "launcher/local.yaml", "launcher/slurm.yaml", "sweeper/optuna.yaml"]
LLAMAFACTORY = Path(__file__).parent / "dataset_info.json"
NEEDED = {
    ("model", "hf"): ["model.path=x"],
    ("data", "files"): ["data.train=x"],
    ("hook", "samples"): ["hook.samples.prompts=x"],
    ("data", "llamafactory"): [f"data.dataset_info={LLAMAFACTORY}", "data.dataset=chats"],
}


def test_every_file_is_covered() -> None:
    assert sorted(path.relative_to(CONF / "hydra").as_posix() for path in CONF.rglob("hydra/*/*")) == HYDRA
    tested = len(OPTIONS) + len(EXPERIMENTS) + len(DEBUG) + len(SWEEPS) + len(HYDRA) + len(["config.yaml"])
    assert tested == len(list(CONF.rglob("*.yaml")))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_every_key_is_read(group: str, option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"{group}={option}", *NEEDED.get((group, option), [])])
    node = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(node, dict)
    if group in NAMED:
        assert list(build_named(group, node, ConfigSources())) == [option]
    else:
        build_component(group, node, ConfigSources())


def component_of(group: str, name: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = OmegaConf.to_container(compose("config", [f"{group}={name}"])[group], resolve=True)
    assert isinstance(node, dict)
    return build_component(group, node, ConfigSources())


def layout_of(name: str) -> Any:
    return component_of("parallelism", name)


def test_the_adapter_that_preflight_offers_is_the_usual_one() -> None:
    assert component_of("adapter", "lora") == LoRA()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_layout_that_preflight_varies_is_its_file(name: str) -> None:
    keys = yaml.safe_load((CONF / "parallelism" / f"{name}.yaml").read_text()).keys() - {"_target_"}
    assert layout_of(name) == DEFAULTS[name]
    assert keys == {field.name for field in fields(DEFAULTS[name])}


VARIANTS = {("stage", "sft"), ("stage", "simpo"), ("parallelism", "single"), ("data", "stdlib")}
"""Options that set other values for the class of another option."""
DEFAULTED = [
    (group, option)
    for group, option in OPTIONS
    if (group, option) not in VARIANTS
    and group not in ("model", "adapter", *NAMED)
    and "_target_" in (CONF / group / f"{option}.yaml").read_text()
    and "defaults:" not in (CONF / group / f"{option}.yaml").read_text()
]


@pytest.mark.parametrize(("group", "option"), DEFAULTED)
def test_a_component_without_keys_is_its_file(group: str, option: str) -> None:
    """So a file of one's own for a subclass names only the keys that differ."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"{group}={option}", *NEEDED.get((group, option), [])])
    node = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(node, dict)
    given = {key.split(".")[1].split("=")[0] for key in NEEDED.get((group, option), [])}
    bare = {key: node[key] for key in ("_target_", *given)}
    whole = build_component(group, node, ConfigSources())
    assert build_component(group, bare, ConfigSources()) == whole


LAYOUTS = [option for group, option in OPTIONS if group == "parallelism" and option[-1].isdigit()]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "fsdp2"])
def test_a_layout_has_the_sizes_of_its_name(name: str) -> None:
    sizes = {key: int(size) for key, size in re.findall(r"(vpp|tp|pp|cp|dp)(\d+)", name)}
    layout = layout_of(name)
    found = {key: getattr(layout, key, 1) for key in ("tp", "pp", "vpp", "cp")}
    assert found == {key: sizes.get(key, 1) for key in found}
    dealt = math.prod(int(size) for _, size in re.findall(r"(etp|ep)(\d+)", name))
    model_ranks = found["tp"] * found["pp"] * found["cp"]
    dp = sizes.get("dp", max(dealt * found["pp"] // model_ranks, 1))
    assert layout.world_size({}, 0) == model_ranks * dp
    assert layout.dp_size(model_ranks * dp) == dp
    if "dp" in sizes and not name.startswith("fsdp2"):  # the name fixes dp, whatever the number of GPUs
        assert layout.world_size({}, 16) == layout.world_size({}, 1) == model_ranks * dp
    else:
        assert layout.world_size({"WORLD_SIZE": "8"}, 0) == layout.world_size({}, 8) == 8
        assert layout.world_size({}, 1) == model_ranks


@pytest.mark.parametrize(
    ("changes", "environ", "num_gpus", "ranks"),
    [
        ({}, {}, 0, 4),
        ({"dp": 6, "dp_replicate": 3}, {}, 8, 6),
        ({"dp_replicate": 3}, {}, 0, 6),
        ({"dp_replicate": 3, "dp_shard": 4}, {}, 8, 12),
        ({}, {"WORLD_SIZE": "8"}, 0, 8),
        ({}, {}, 5, 4),
        ({}, {}, 1, 2),
    ],
)
def test_copies_of_the_model_take_their_ranks(
    changes: dict[str, int], environ: dict[str, str], num_gpus: int, ranks: int
) -> None:
    layout = replace(layout_of("hsdp"), **changes)
    assert layout.world_size(environ, num_gpus) == ranks
    assert layout.dp_size(ranks) == ranks


def test_a_launcher_that_splits_a_copy_is_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 2 ranks but the launcher started WORLD_SIZE=5"):
        layout_of("hsdp").world_size({"WORLD_SIZE": "5"}, 0)


@pytest.mark.parametrize(
    "choice", [*(f"experiment={name}" for name in EXPERIMENTS), *(f"debug={name}" for name in DEBUG)]
)
def test_an_experiment_composes(choice: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        compose("config", [choice])


def test_one_batch_is_learnt_with_the_scheduler_of_an_experiment() -> None:
    words = ("debug=overfit", "experiment=pretrain_wsd", "run.name=x")
    assert build_experiment(composed(words), ConfigSources()).scheduler == WSD(decay_steps=40)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_sweeps_and_its_jobs_compose(
    sweep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep file starts a sweep without ``-m``, and the overrides of one job run only that job."""
    jobs: list[Any] = []
    monkeypatch.setattr("runner.launch.run.run", lambda *given: jobs.append(given[1].overrides) or 1.0)
    trials = ["hydra.sweeper.n_trials=3"] if "search" in sweep else []
    assert call_here(f"sweep={sweep}", *trials, f"run.output_dir={tmp_path}") == 0
    assert len(jobs) > 2
    assert call_here(*single_job_overrides(jobs[1], []), *trials) == 0
    assert jobs.pop()[: len(jobs[1])] == jobs[1]


def test_a_key_of_a_logger_came_from_its_own_file() -> None:
    for choices in ({}, {"logger": "wandb"}):  # Hydra records no choice if there are several
        assert ConfigSources(choices, (), (CONF,)).of("logger.wandb.mode") == "conf/logger/wandb.yaml"


@pytest.mark.parametrize(
    ("golden", "overrides"),
    [
        ("default", []),
        ("pt_fsdp2", ["stage=pt", "parallelism=fsdp2", "optimizer=sgd", "scheduler=wsd"]),
        ("dpo_files", ["stage=dpo", "data=files", "data.train=pairs.json", "model=qwen3_0_6b"]),
        ("dpo_tp2pp2", ["stage=dpo", "parallelism=tp2pp2", "parallelism.cp=2"]),
    ],
)
def test_the_composed_config_is_the_golden_one(golden: str, overrides: list[str]) -> None:
    """To accept a change: python -m runner --cfg job OVERRIDES > tests/conf/golden/NAME.yaml"""
    command = [sys.executable, "-m", "runner", "--cfg", "job", *overrides]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == (GOLDEN / f"{golden}.yaml").read_text()


def test_an_option_of_the_optimizer_brings_its_schedule() -> None:
    for words, schedule in (((), "Constant"), (("scheduler=cosine",), "Cosine")):
        config = composed(["run.name=x", "optimizer=schedule_free", *words])
        assert config["scheduler"]["_target_"] == f"components.schedulers.{schedule}"


def test_a_variable_of_the_environment_may_be_a_number_or_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "7")
    values = ("run.seed=${oc.env:SEED}", "run.name='${oc.env:SEED}'", "run.log_every='${oc.env:NONE,3}'")
    monkeypatch.setenv("RATE", "1e-5")
    values += ("optimizer.lr='${oc.env:RATE}'", "run.max_time='${oc.env:NONE,null}'")
    assert call_here(f"run.output_dir={tmp_path}", "preflight.mode=only", *values) == 0
    jobs: list[Any] = []
    monkeypatch.setattr("runner.launch.run.run", lambda *given: jobs.append(given[0]["run"]["seed"]) or 1.0)
    swept = ("-m", "optimizer=adamw,sgd")
    assert call_here(*swept, f"run.output_dir={tmp_path}", *values) == 0
    assert jobs == [7, 7]


@pytest.mark.parametrize("name", HOLDS_OUT)
def test_finetuning_holds_out_samples_unless_there_is_evaluation_data(name: str) -> None:
    options, share = HOLDS_OUT[name]
    config = composed(["run.name=a", "experiment=finetune", "model.path=m", *options])
    assert config["data"]["eval_fraction"] == share
