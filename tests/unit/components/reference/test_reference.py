"""The reference model that stage.reference and stage.reference_path select, and the errors of both."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from components.contracts.errors import ConfigError
from components.data.tokenizer import PATH as EMBEDDED_TOKENIZER
from components.losses import DPO, NextToken
from components.models import ModelSpec
from components.reference.source import ReferenceSource, resolve_reference

SHAPE = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class Adapter:
    modules_to_save: list[str] | None = None
    path: str | None = None


def model(vocab_size: int = 16384) -> ModelSpec:
    return ModelSpec(architecture=SHAPE | {"vocab_size": vocab_size})


def dpo(**options: Any) -> DPO:
    return DPO(beta=0.1, label_smoothing=0.0, **options)


SYNCED = dpo(sync_reference_every=2)


@pytest.mark.parametrize(
    ("options", "adapter", "choice"),
    [
        ({}, None, "frozen"),
        ({}, Adapter(), "adapter_off"),
        ({}, Adapter(["lm_head"]), "frozen"),
        ({"reference_path": "/other"}, Adapter(), "frozen"),
        ({"reference": "frozen"}, Adapter(), "frozen"),
        ({"reference": "adapter_off"}, Adapter(path="/adapter"), "adapter_off"),
        ({"reference": "precomputed"}, Adapter(["lm_head"]), "precomputed"),
        ({"reference": "none"}, None, "none"),
    ],
)
def test_what_it_comes_to(options: dict[str, Any], adapter: Any, choice: str) -> None:
    source = resolve_reference(dpo(**options), model(), adapter)
    assert source.choice == choice
    assert source.engine_mode == ("none" if choice == "precomputed" else choice)


def test_a_model_without_vectors_may_be_asked_too() -> None:
    """Without 1-D parameters nothing is frozen, because an engine requires a trainable parameter."""
    olmo = ModelSpec(architecture=SHAPE | {"model_type": "olmo"})
    asked = ReferenceSource("precomputed", olmo, is_separate_model=False)
    assert asked.frozen_spec().freeze == ()


def test_where_it_comes_from() -> None:
    assert resolve_reference(dpo(reference="none"), model()).describe_init is None
    assert resolve_reference(dpo(reference="precomputed"), model()).describe_init == "model.init=random"
    assert resolve_reference(dpo(reference_path="/x"), model()).describe_init == "stage.reference_path=/x"
    mixed = "stage.sync_reference_every=2 and stage.sync_reference_mixup=0.6"
    assert resolve_reference(SYNCED, model()).describe_init == f"model.init=random, with {mixed}"


def test_the_content_of_a_reference_does_not_depend_on_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2)}, tmp_path / name / "model.safetensors")
    one, same = (resolve_reference(dpo(reference_path=str(tmp_path / name)), model()) for name in "ab")
    assert one.describe_init != same.describe_init
    assert one.content_hash(0) == same.content_hash(1)
    save_file({"weight": torch.zeros(2)}, tmp_path / "b" / "model.safetensors")
    assert one.content_hash(0) != same.content_hash(0)
    assert resolve_reference(SYNCED, model()).content_hash(0) != resolve_reference(
        dpo(), model()
    ).content_hash(0)


def test_what_is_only_asked_is_hardly_trained() -> None:
    """Only 1-D parameters stay trainable, whatever patterns of ``freeze`` the trained model has."""
    trained = replace(model(), freeze=("model.norm.*",))
    asked = resolve_reference(dpo(reference="precomputed"), trained).frozen_spec()
    parameters = dict(asked.build(asked.config()).named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }


@dataclass(frozen=True)
class OnText(NextToken):
    reference: Any = "precomputed"


@pytest.mark.parametrize(
    ("stage", "adapter", "words"),
    [
        (dpo(reference="adapter_off"), None, ["stage.reference", "adapter=none", "frozen"]),
        (dpo(reference="adapter_off"), Adapter(["lm_head"]), ["adapter.modules_to_save", "precomputed"]),
        (dpo(reference="adapter_off", reference_path="/x"), Adapter(), ["stage.reference_path"]),
        (dpo(reference="none", reference_path="/x"), None, ["stage.reference_path", "not read"]),
        (dpo(), Adapter(path="/adapter"), ["stage.reference", "adapter.path", "adapter_off"]),
        (OnText(), None, ["precomputed", "cut across rows"]),
        (SYNCED, Adapter(), ["stage.sync_reference_every", "adapter_off", "frozen"]),
        (replace(SYNCED, reference="none"), None, ["stage.sync_reference_every", "none", "frozen"]),
        (replace(SYNCED, reference="precomputed"), None, ["stage.sync_reference_every", "precomputed"]),
        (replace(SYNCED, reference="frozen"), Adapter(), ["stage.sync_reference_every", "adapter=none"]),
    ],
)
def test_what_is_refused(stage: Any, adapter: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_reference(stage, model(), adapter)
    for word in words:
        assert word in str(error.value)


def saved(path: Path, vocab_size: int = 16384, tokenizer: str | None = EMBEDDED_TOKENIZER) -> Path:
    description = model(vocab_size)
    description.build(description.config()).to_empty(device="cpu").save_pretrained(path)
    if tokenizer is not None:
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)
    return path


def renumbered(path: Path) -> str:
    """Write the embedded tokenizer with the ids of two tokens exchanged, and return its folder."""
    path.mkdir()
    content = json.loads(Path(EMBEDDED_TOKENIZER, "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["zero"], words["Ġself"] = words["Ġself"], words["zero"]
    (path / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(Path(EMBEDDED_TOKENIZER, "tokenizer_config.json"), path)
    return str(path)


def check(path: Path) -> None:
    ours = model()
    resolve_reference(dpo(reference_path=str(path)), ours).check(ours.meta_model, ours.load_tokenizer())


def test_a_reference_that_is_mixed_has_the_shape_of_the_trained_model(tmp_path: Path) -> None:
    ours, theirs = model(), ModelSpec(architecture=SHAPE | {"vocab_size": 16384, "num_hidden_layers": 2})
    theirs.build(theirs.config()).to_empty(device="cpu").save_pretrained(tmp_path)
    shutil.copytree(EMBEDDED_TOKENIZER, tmp_path, dirs_exist_ok=True)
    for loss in (dpo(reference_path=str(tmp_path)), SYNCED):
        resolve_reference(loss, ours)
    mixed = resolve_reference(dpo(reference_path=str(tmp_path), sync_reference_every=2), ours)
    with pytest.raises(ConfigError, match=r"stage.sync_reference_every.*other names or shapes"):
        mixed.check(ours.meta_model, ours.load_tokenizer())


def test_a_model_of_the_same_tokens_may_be_the_reference(tmp_path: Path) -> None:
    check(saved(tmp_path))


def test_a_reference_that_is_none_is_refused(tmp_path: Path) -> None:
    cases = {
        tmp_path / "absent": ["stage.reference_path=", "no such folder"],
        saved(tmp_path / "size", 16385): ["16385", "16384"],
        saved(tmp_path / "bare", tokenizer=None): ["stage.reference_path", "no tokenizer"],
        saved(tmp_path / "other", tokenizer=renumbered(tmp_path / "words")): ["gives tokens other ids"],
    }
    for path, words in cases.items():
        with pytest.raises(ConfigError) as error:
            check(path)
        for word in ("stage.reference_path", *words):
            assert word in str(error.value)
        assert "model.path" not in str(error.value)
