"""Multi-token prediction: the inputs of its layers, their weights on disk, and exports with them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.contracts.batch import IGNORE, Batch
from components.models import ModelSpec, export_folder, named_shapes
from components.models.mtp import MTPConfig
from tests.distributed.cases import COMMON, LAYOUTS, SHAPES, sequences, spec

FAMILIES = ("llama", "qwen3", "mistral", "qwen2", "gemma", "qwen3_moe", "mixtral", "deepseek")


def with_layers(family: str, layers: int = 2) -> ModelSpec:
    return replace(spec(family), mtp=MTPConfig(layers))


def one_by_one(batch: Batch, steps: int) -> tuple[list[int], list[int]]:
    """Return the tokens and labels ``steps`` positions ahead, one sequence after the other."""
    ids, labels = [], []
    for row in sequences():
        gone = [0] * min(steps, len(row.ids)), [IGNORE] * min(steps, len(row.ids))
        ids += row.ids[steps:].tolist() + gone[0]
        labels += row.labels[steps:].tolist() + gone[1]
    return ids, labels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [1, 2, 4, 100])
def test_no_token_or_label_crosses_the_end_of_its_sequence(layout: str, steps: int) -> None:
    """The shortest sequence has 3 tokens, the longest 30."""
    batch = LAYOUTS[layout](sequences())
    ahead, real = batch.shifted(steps), batch.real_sequence_ids() >= 0
    ids, labels = one_by_one(batch, steps)
    assert ahead.input_ids[real].tolist() == ids
    assert ahead.labels[real].tolist() == labels
    assert (ahead.labels[~real] == IGNORE).all()
    assert ahead.labelled().tolist() == (ahead.labels.reshape(-1) != IGNORE).nonzero()[:, 0].tolist()
    assert ahead.labels.shape == batch.labels.shape


def test_the_end_of_a_padded_row_is_padding() -> None:
    batch = LAYOUTS["packed"](sequences()[:2])
    padded = replace(batch, seqlens=torch.tensor([5, 15], dtype=torch.int32))
    assert padded.shifted(1).labels[0, -3:].tolist() == [IGNORE] * 3
    assert padded.shifted(1).input_ids[0, -3:].tolist() == [0] * 3
    assert padded.shifted(1).input_ids[0, -4] == batch.input_ids[0, -3]


def test_an_empty_micro_batch_counts_nothing() -> None:
    batch = LAYOUTS["packed"](sequences()[:2])
    empty = batch.select(torch.zeros(2, dtype=torch.bool))
    assert with_layers("llama").mtp.counts(empty) == {"mtp_1_loss": 0, "mtp_2_loss": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_model_to_transformers(family: str, tmp_path: Path) -> None:
    """transformers ignores the MTP layers of an export and computes the same logits."""
    described, plain = with_layers(family), spec(family)
    weights, shapes = described.weights(0), named_shapes(described.build(described.config()))
    added = shapes.keys() - named_shapes(plain.build(plain.config())).keys()
    first = plain.config().num_hidden_layers
    assert {int(name.split(".")[2]) for name in added} == {first, first + 1}
    export_folder(described, ((name, weights(name)) for name in shapes), tmp_path / "with", torch.float32)
    bare, names = plain.weights(0), named_shapes(plain.build(plain.config()))
    export_folder(plain, ((name, bare(name)) for name in names), tmp_path / "without", torch.float32)
    ids = sequences()[3].ids[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("with", "without")
    ]
    assert torch.equal(*logits)


def test_weights_are_read_where_they_are_stored_and_drawn_where_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described = with_layers("llama", 1)
    weights, shapes = described.weights(3), named_shapes(described.build(described.config()))
    export_folder(described, ((name, weights(name)) for name in shapes), tmp_path, torch.float32)

    def read(layers: int) -> dict[str, torch.Tensor]:
        stored = ModelSpec(path=str(tmp_path), init="pretrained", mtp=MTPConfig(layers))
        source = stored.weights(0)
        return {name: source(name) for name in named_shapes(stored.build(stored.config()))}

    with caplog.at_level(logging.WARNING):
        found = read(1)
    assert not caplog.records
    assert all(torch.equal(found[name], weights(name)) for name in shapes)
    assert read(0).keys() == {name for name in shapes if not name.startswith("model.layers.2.")}
    assert not caplog.records
    two = read(2)
    assert "model.layers.3.eh_proj.weight (13 lacking)" in caplog.text
    drawn = with_layers("llama", 2).weights(0)
    for name, value in two.items():
        source = drawn if name.startswith("model.layers.3.") else weights
        assert torch.equal(value, source(name)), name


def test_layers_change_no_other_weight() -> None:
    """Every weight is drawn by its name, and the weights of two MTP depths differ."""
    plain, described = spec("qwen3").weights(0), with_layers("qwen3").weights(0)
    for name in named_shapes(spec("qwen3").build(spec("qwen3").config())):
        assert torch.equal(plain(name), described(name))
    name = "model.layers.{}.eh_proj.weight"
    assert not torch.equal(described(name.format(2)), described(name.format(3)))
    assert described(name.format(2)).std() == pytest.approx(COMMON["initializer_range"], rel=0.1)


def test_a_folder_that_says_how_many_it_has_is_read_without_them() -> None:
    fields = COMMON | SHAPES["llama"]
    config = ModelSpec(architecture=fields, mtp=MTPConfig(2)).config()
    assert config.num_nextn_predict_layers == 2
    assert not hasattr(ModelSpec(architecture=fields).config(), "num_nextn_predict_layers")
