"""Loading Hugging Face weights into Megatron and exporting them in every layout, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.checkpoint.dcp import load_tensors, save_tensors, saved_keys
from components.models import ModelSpec, named_shapes
from tests.distributed import megatron_tensors_cases as tensors_cases
from tests.distributed import megatron_weights_cases as cases
from tests.ranks import Ranks

LAYOUTS: dict[str, cases.Sizes] = {
    "single": (1, 1, 1),  # on four ranks: four replicas
    "tp2": (2, 1, 1),
    "pp2": (1, 2, 1),
    "tp2pp2": (2, 2, 1),
    "pp2vpp2": (1, 2, 2),
}
every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)

BASE: dict[str, Any] = {
    "vocab_size": 97,  # not divisible by any tp
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "head_dim": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
}
SPECS = {
    f"{name}-{'tied' if tied else 'untied'}": ModelSpec(
        architecture=BASE | family | {"tie_word_embeddings": tied}
    )
    for name, family in FAMILIES.items()
    for tied in (True, False)
}


@pytest.fixture(scope="module")
def ranks(megatron_ranks: Ranks) -> Ranks:
    return megatron_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save models with transformers, without constant parameters."""
    root, found = tmp_path_factory.mktemp("models"), {}
    g = torch.Generator().manual_seed(0)
    for name, spec in SPECS.items():
        model = AutoModelForCausalLM.from_config(spec.config())
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.data = mean + 0.1 * torch.randn(parameter.shape, generator=g)
        model.save_pretrained(root / name)
        found[name] = root / name
    return found


@torch.no_grad()
def reference(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model(input_ids=cases.IDS, use_cache=False).logits


def on_last_stage(answers: list[Tensor]) -> list[Tensor]:
    found = [answer for answer in answers if answer.numel()]
    assert found
    return found


@every_layout
def test_logits_are_those_of_transformers(ranks: Ranks, folders: dict[str, Path], sizes: cases.Sizes) -> None:
    answers = ranks.run(cases.logits_of, sizes, folders)
    for name, folder in folders.items():
        expected = reference(folder)
        for found in on_last_stage([answer[name] for answer in answers]):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_logits_tell_one_flipped_row(ranks: Ranks, folders: dict[str, Path], sizes: cases.Sizes) -> None:
    """A wrong row changes the logits, which is the control of the test above."""
    folder = folders["llama-untied"]
    expected = reference(folder)
    for found in on_last_stage(ranks.run(cases.logits_of_a_flipped_row, sizes, folder)):
        assert (found - expected).abs().max() > 1e-3 * expected.abs().max()


@every_layout
def test_the_export_is_bitwise_the_import(
    ranks: Ranks, folders: dict[str, Path], sizes: cases.Sizes, tmp_path: Path
) -> None:
    ranks.run(cases.exported, sizes, folders, tmp_path)
    for name, folder in folders.items():
        written = tmp_path / name
        model, info = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        assert not any(info.values()), name
        assert type(model) is type(AutoModelForCausalLM.from_pretrained(folder))
        found, expected = stored(written), stored(folder)
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        assert sum(map(len, map(load_file, written.glob("*.safetensors")))) == len(expected), "once each"


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_every_stage_writes_a_file(ranks: Ranks, folders: dict[str, Path], tmp_path: Path) -> None:
    chosen = {"llama": folders["llama-tied"]}
    ranks.run(cases.exported, (2, 2, 1), chosen, tmp_path)
    written = {path.name for path in (tmp_path / "llama").iterdir()}
    files = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert written == files | {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "llama" / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    assert where["model.embed_tokens.weight"] == where["model.layers.1.mlp.up_proj.weight"]
    assert where["model.norm.weight"] == where["model.layers.2.mlp.up_proj.weight"]
    assert set(where.values()) == files


# ---- the parameters of a rank


@every_layout
def test_a_rank_asks_for_its_part_alone(ranks: Ranks, folders: dict[str, Path], sizes: cases.Sizes) -> None:
    tp, pp, vpp = sizes
    spec = SPECS["qwen2-tied"]
    shapes = named_shapes(spec.build(spec.config()))
    answers = ranks.run(cases.holdings, sizes, folders["qwen2-tied"])
    held_by: dict[str, set[int]] = {}
    for answer in answers:
        for name in answer.asked:
            held_by.setdefault(name, set()).add(answer.stage)
    assert held_by.keys() == shapes.keys()
    for name, stages in held_by.items():
        tied = name == "model.embed_tokens.weight"
        assert stages == ({0, pp - 1} if tied else {stage_of(name, pp, vpp)}), name
    for name, shape in shapes.items():
        asked = [answer.asked[name] for answer in answers if name in answer.asked]
        copies = len(asked) // (1 if "norm" in name else tp)
        assert sum(asked) == copies * shape.numel(), name


def stage_of(name: str, pp: int, vpp: int) -> int:
    """Return the stage of a parameter. Chunks of four layers in total are dealt to the stages in turn."""
    if name == "model.norm.weight":
        return pp - 1
    return int(name.split(".")[2]) // (4 // (pp * vpp)) % pp


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "llama-untied"])
def test_the_padding_of_the_vocabulary_is_zero(
    ranks: Ranks, folders: dict[str, Path], sizes: cases.Sizes, name: str
) -> None:
    answers = ranks.run(cases.holdings, sizes, folders[name])
    tp, pp, _ = sizes
    padding = [x for answer in answers for x in answer.padding]
    copies = 4 // (tp * pp) * (1 if name == "llama-tied" and pp == 1 else 2)
    assert len(padding) == (-(-97 // tp) * tp - 97) * 32 * copies
    assert set(padding) == {0.0}
    secondary = [n for answer in answers for n in answer.secondary]
    assert set(secondary) == ({"model.embed_tokens.weight"} if name == "llama-tied" and pp == 2 else set())


CHANGES: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "lacking": ({"model.norm.weight": None}, "final_layernorm.weight: the model has no model.norm.weight"),
    "query groups": (
        {"model.layers.1.self_attn.k_proj.weight": (24, 32)},
        "layers.1.self_attention.linear_qkv.weight: 32 rows are no whole query groups",
    ),
    "columns": ({"model.layers.1.self_attn.k_proj.weight": (16, 31)}, "not the model.layers.1.self_attn.k"),
    "rows": ({"model.layers.1.mlp.up_proj.weight": (50, 32)}, "not the model.layers.1.mlp.up_proj.weight"),
    "norm": ({"model.norm.weight": (33,)}, "not the model.norm.weight"),
    "vocabulary": ({"lm_head.weight": (200, 32)}, "not the lm_head.weight"),
}


def test_a_model_of_another_shape_is_refused(ranks: Ranks, folders: dict[str, Path]) -> None:
    changes = {label: change for label, (change, _) in CHANGES.items()}
    for answers in ranks.run(cases.refusals, folders["llama-untied"], changes):
        for label, (_, message) in CHANGES.items():
            assert message in answers.get(label, "accepted"), label


def test_every_row_of_every_parameter_has_one_name(ranks: Ranks, folders: dict[str, Path]) -> None:
    for answers in ranks.run(cases.refusals_of_other_parameters, folders["llama-untied"]):
        assert "a parameter with two names" in answers["twice"]
        assert "a parameter without a name" in answers["unnamed"]
        assert "a row that is in two tensors" in answers["overlap"]
        assert "a row that is in no tensor" in answers["gap"]


# ---- checkpoints


def expected_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    weights = spec.weights(0)
    names = named_shapes(spec.build(spec.config()))
    return {
        f"{kind}/{name}": tensors_cases.value(kind, weights)(name)
        for kind in tensors_cases.KINDS
        for name in names
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


SAVED = {
    "tp2pp2-tied": ((2, 2, 1), SPECS["qwen2-tied"]),
    "pp2vpp2-untied": ((1, 2, 2), SPECS["qwen3-untied"]),
    # Three ranks hold three rows of the vocabulary each, and the last rank holds none.
    "tp4-nine-words": ((4, 1, 1), ModelSpec(architecture=BASE | FAMILIES["llama"] | {"vocab_size": 9})),
}
saved = pytest.mark.parametrize(("sizes", "spec"), SAVED.values(), ids=SAVED)


@saved
def test_a_checkpoint_is_read_without_megatron(
    ranks: Ranks, sizes: cases.Sizes, spec: ModelSpec, tmp_path: Path
) -> None:
    ranks.run(tensors_cases.save_checkpoint, sizes, spec, tmp_path)
    expected = expected_tensors(spec)
    assert saved_keys(tmp_path) == expected.keys() | {"optimizer_step"}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_tensors(tmp_path, found)
    assert_same(found, expected)


@saved
def test_a_checkpoint_of_one_process_is_read(
    ranks: Ranks, sizes: cases.Sizes, spec: ModelSpec, tmp_path: Path
) -> None:
    save_tensors(tmp_path, expected_tensors(spec))
    assert ranks.run(tensors_cases.load_checkpoint, sizes, spec, tmp_path) == [[]] * 4


def test_fsdp2_reads_what_megatron_saved(ranks: Ranks, tmp_path: Path) -> None:
    sizes, spec = SAVED["tp2pp2-tied"]
    ranks.run(tensors_cases.save_checkpoint, sizes, spec, tmp_path)
    for found in ranks.run(tensors_cases.load_by_fsdp2, spec, tmp_path):
        assert_same(found, expected_tensors(spec))


def test_megatron_reads_what_fsdp2_saved(ranks: Ranks, tmp_path: Path) -> None:
    sizes, spec = SAVED["tp2pp2-tied"]
    ranks.run(tensors_cases.save_by_fsdp2, spec, tmp_path)
    assert ranks.run(tensors_cases.load_checkpoint, sizes, spec, tmp_path) == [[]] * 4


def test_gathered_takes_any_tensor_of_the_parameters(ranks: Ranks) -> None:
    sizes, spec = SAVED["tp2pp2-tied"]
    expected = {k.removeprefix("exp_avg/"): v for k, v in expected_tensors(spec).items() if "avg/" in k}
    answers = ranks.run(tensors_cases.gathered_moments, sizes, spec)
    assert [a.keys() & b.keys() for a, b in zip(answers[:2], answers[2:], strict=True)] == [set(), set()]
    for first, second in zip(answers[:2], answers[2:], strict=True):
        assert_same(first | second, expected)
