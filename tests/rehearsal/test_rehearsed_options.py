"""The configurations that are rehearsed set every option of both engines, with listed exceptions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.conf_folder import config_dir
from tests.rehearsal.test_estimates import LARGE, OTHER_TRAFFIC, RECOMPUTED_MLPS, TENSOR_PARALLEL
from tests.rehearsal.test_layouts import FSDP2, MEGATRON

CONF = Path(config_dir())
DEFAULTS = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
ROWS = {"fsdp2": FSDP2, "megatron": MEGATRON}
ESTIMATED = [
    *LARGE.values(),
    *RECOMPUTED_MLPS.values(),
    *TENSOR_PARALLEL.values(),
    *(words for _, words in OTHER_TRAFFIC.values()),
]
TRANSFORMER_ENGINE = "the kernels of Transformer Engine need real tensors"
NOT_REHEARSED: Mapping[str, Mapping[str, str]] = {
    "fsdp2": {},
    "megatron": dict.fromkeys(("transformer_impl", "fp8_recipe", "moe_permute_fusion"), TRANSFORMER_ENGINE),
}
"""Engine -> keys of its layout that no rehearsal sets, and the reason."""


SCALES = "a number in a formula"
A_FOLDER = "it needs the files of a model or of an adapter, which are read as others are"
BY_OPTION = "another option of the group sets it"
NOT_GIVEN: Mapping[str, Mapping[str, str]] = {
    "stage": {
        **dict.fromkeys(
            ("beta", "cpo_alpha", "simpo_gamma", "alpha_divergence_coef", "discopop_tau"), SCALES
        ),
        **dict.fromkeys(("desirable_weight", "undesirable_weight", "sync_reference_mixup"), SCALES),
        "kind": BY_OPTION,
        "reference_path": A_FOLDER,
    },
    "adapter": {"alpha": SCALES, "path": A_FOLDER, "dora": BY_OPTION, "quantize": BY_OPTION},
}
"""Group -> keys of its options that no rehearsal gives, and the reason."""


def values_of(layout: str) -> dict[str, Any]:
    """Return the values in conf/parallelism/LAYOUT.yaml and in its defaults."""
    own = yaml.safe_load((CONF / "parallelism" / f"{layout}.yaml").read_text())
    values: dict[str, Any] = {}
    for base in own.pop("defaults", ["_self_"]):
        values |= own if base == "_self_" else values_of(base)
    return values


def overridden(words: Sequence[str], prefix: str) -> dict[str, Any]:
    """Return the values that ``words`` give to keys that begin with ``prefix``, without this prefix."""
    pairs = (word.split("=", 1) for word in words if word.startswith(prefix))
    return {key.removeprefix(prefix): yaml.safe_load(value) for key, value in pairs}


def chosen(words: Sequence[str], group: str, default: str = "") -> str:
    """Return the option of ``group`` that ``words`` name."""
    return dict(word.split("=", 1) for word in words).get(group, default)


def of_engine(engine: str) -> list[list[str]]:
    """Return the words of all configurations of an engine that are rehearsed."""
    named = ("fsdp2", "single", "hsdp")
    own = [
        words for words in ESTIMATED if chosen(words, "parallelism").startswith(named) == (engine == "fsdp2")
    ]
    return [*ROWS[engine].values(), *own]


def keys_set(words: Sequence[str], defaults: Mapping[str, Any]) -> set[str]:
    """Return the keys of the layout to which ``words`` give another value than ``defaults``."""
    values = values_of(chosen(words, "parallelism")) | overridden(words, "parallelism.")
    return {key for key, value in values.items() if value != defaults.get(key, value)}


@pytest.mark.parametrize("engine", ROWS)
def test_every_key_of_a_layout_is_rehearsed(engine: str) -> None:
    """Some configuration gives each key another value than its default, or the key is a listed exception."""
    defaults = values_of(engine)
    keys = set().union(*(keys_set(words, defaults) for words in of_engine(engine)))
    assert defaults.keys() - {"_target_"} - keys == NOT_REHEARSED[engine].keys()


@pytest.mark.parametrize("group", ["stage", "optimizer", "adapter"])
def test_every_option_of_a_group_is_rehearsed(group: str) -> None:
    """One of the engines rehearses it."""
    (default,) = (entry[group] for entry in DEFAULTS if group in entry)
    found = {chosen(words, group, default) for engine in ROWS for words in of_engine(engine)}
    assert found == {path.stem for path in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize("group", ["stage", "adapter"])
def test_every_key_of_a_group_is_rehearsed(group: str) -> None:
    """Some configuration gives it by name. Numbers that only scale a term change nothing on a GPU."""
    keys = {key for path in (CONF / group).glob("*.yaml") for key in yaml.safe_load(path.read_text())}
    given = {key for engine in ROWS for words in of_engine(engine) for key in overridden(words, f"{group}.")}
    assert keys - {"_target_", "defaults"} - given == NOT_GIVEN[group].keys()


@pytest.mark.parametrize("engine", ROWS)
def test_every_load_balancing_is_rehearsed(engine: str) -> None:
    """Each router loss has a coefficient, and router biases a step, by an override or by the model."""
    found: set[tuple[str, Any]] = set()
    for words in of_engine(engine):
        model = yaml.safe_load((CONF / "model" / f"{chosen(words, 'model', 'tiny')}.yaml").read_text())
        found |= (model.get("moe", {}) | overridden(words, "model.moe.")).items()
    assert {value for key, value in found if key == "aux_loss"} == {"switch", "sequence", "global_batch"}
    assert {key for key, value in found if key != "aux_loss" and value > 0} == {
        "aux_loss_coef",
        "z_loss_coef",
        "bias_update_rate",
    }
