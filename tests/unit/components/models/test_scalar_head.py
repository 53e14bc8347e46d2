"""The weights of a model with a scalar head come from folders of language models and of classifiers."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from components.contracts.errors import ConfigError
from components.models import ModelSpec, named_shapes, stream_folder
from components.models.scalar_head import is_classifier
from tests.unit.components.models.test_weights import FAMILIES

NAME = "score.weight"


def save(folder: Path, kind: type, *, tied: bool, num_labels: int = 1, safe: bool = True) -> ModelSpec:
    config = ModelSpec(architecture=FAMILIES["qwen3"] | {"tie_word_embeddings": tied}).config()
    config.num_labels = num_labels
    model = kind.from_config(config)  # type: ignore[attr-defined]
    if safe:
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return ModelSpec(path=str(folder), init="pretrained", scalar_head=True)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_drawn_for_a_language_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tied: bool, safe: bool
) -> None:
    """It is that of the seed, as with random weights, and the head over the vocabulary is left out."""
    spec = save(tmp_path, AutoModelForCausalLM, tied=tied, safe=safe)
    with caplog.at_level(logging.WARNING):
        weights = spec.weights(3)
    assert ("converting" in caplog.text) == (not safe)
    assert f"has no {NAME}" in caplog.text
    assert list(named_shapes(spec.meta_model))[-1] == NAME
    drawn = ModelSpec(path=str(tmp_path), scalar_head=True).weights(3)
    assert torch.equal(weights(NAME), drawn(NAME))
    assert not torch.equal(weights(NAME), spec.weights(4)(NAME))
    assert 0.5 < weights(NAME).std() / spec.config().initializer_range < 2


def test_a_classifier_keeps_its_head(tmp_path: Path) -> None:
    weights = save(tmp_path, AutoModelForSequenceClassification, tied=False).weights(0)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights(name), tensor) for name, tensor in stored.items())
    assert NAME in stored
    assert is_classifier(tmp_path)
    with pytest.raises(ConfigError, match=r"is a classifier, .*stage=rm"):
        ModelSpec(path=str(tmp_path), init="pretrained").config()


def test_a_classifier_of_two_labels_is_refused(tmp_path: Path) -> None:
    spec = save(tmp_path, AutoModelForSequenceClassification, tied=False, num_labels=2)
    with pytest.raises(ConfigError, match="classifier with 2 labels"):
        spec.weights(0)


def test_a_family_without_classifiers_is_refused() -> None:
    architecture = {"model_type": "granite", "hidden_size": 16, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="no sequence classifier of granite"):
        ModelSpec(architecture=architecture, scalar_head=True).config()


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"] | {"tie_word_embeddings": True}, scalar_head=True)
    source = spec.weights(0)
    stream_folder(spec, named_shapes(spec.meta_model), source, tmp_path, torch.float32)
    found, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(found).__name__]
    assert torch.equal(found.score.weight, source(NAME))
    assert found.score.weight.shape == (1, 32)
