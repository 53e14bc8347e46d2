"""Random weights, saved weights and buffers, by Hugging Face name, compared with transformers."""

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from components.adapters import LoRA, export_adapter
from components.checkpoint import dcp
from components.contracts.errors import ConfigError
from components.data.tokenizer import PATH
from components.engines.shared.process_group import init_process_group
from components.models import (
    ModelSpec,
    WeightSource,
    export_folder,
    materialize_buffers,
    named_shapes,
    pretrained,
    shape_hash,
)
from components.models.generate import add_tokenizer, use_plain_decoding
from components.models.initialize import random_weights
from components.models.pretrained import content_hash
from tests.ranks import Ranks

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "llama": BASE | {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "pad_token_id": 5},
    "qwen2": BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 16},
    "yarn": BASE
    | {
        "model_type": "qwen3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
    },
    "gemma3": BASE | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16},
}
family = pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)


def loaded(spec: ModelSpec, weights: WeightSource) -> PreTrainedModel:
    """Load weights as an engine does: allocate a meta model, fill the buffers, then copy each parameter."""
    model = spec.build(spec.config())
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)
    materialize_buffers(model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name))
    return model.eval()


def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(3 * 70).reshape(3, 70) * 7 % 96
    return model(input_ids=ids, use_cache=False).logits


# ---- saved weights


@family
def test_logits_equal_from_pretrained(architecture: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ModelSpec(architecture=architecture).config()).save_pretrained(tmp_path)
    spec = ModelSpec(path=str(tmp_path), init="pretrained")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(logits(loaded(spec, spec.weights(0))), logits(expected))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_config(ModelSpec(architecture=FAMILIES["qwen3"]).config())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path, {name: p.detach() for name, p in model.named_parameters()}


def read_all(folder: Path) -> dict[str, Tensor]:
    spec = ModelSpec(path=str(folder), init="pretrained")
    weights = spec.weights(0)
    return {name: weights(name) for name in named_shapes(spec.build(spec.config()))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_shards_are_read_by_name(
    saved: tuple[Path, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = saved
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same(read_all(folder), expected)
    assert not caplog.records


def test_a_missing_shard_is_named(saved: tuple[Path, dict[str, Tensor]]) -> None:
    lost = sorted(saved[0].glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=f"{lost.name} is missing"):
        read_all(saved[0])


def test_one_file_comes_before_an_index_as_in_transformers(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = saved
    other = {name: value + 1 for name, value in tensors.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same(read_all(folder), other)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_same({name: p.detach() for name, p in loaded.named_parameters()}, other)


def rewrite(folder: Path, tensors: dict[str, Tensor], *, as_bin: bool = False) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_files_beside_the_weights_do_not_change_their_hash(saved: tuple[Path, dict[str, Tensor]]) -> None:
    rewrite(*saved, as_bin=True)
    before = content_hash(saved[0])
    (saved[0] / "training_args.bin").write_bytes(b"of a trainer")
    assert content_hash(saved[0]) == before


@pytest.mark.parametrize("layout", ["bin", "older names", "tied head only"])
def test_other_layouts_are_converted_and_the_log_says_so(
    saved: tuple[Path, dict[str, Tensor]], layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = saved
    tensors = dict(expected)
    if layout == "older names":
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    if layout == "tied head only":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(folder, tensors, as_bin=layout == "bin")
    with caplog.at_level(logging.WARNING):
        assert_same(read_all(folder), expected)
    assert "converting on CPU" in caplog.text


def test_further_tensors_are_logged_and_need_no_conversion(
    saved: tuple[Path, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = saved
    rewrite(folder, expected | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_same(read_all(folder), expected)
    assert "1 tensors that the model does not have, such as model.layers.0.self_attn.rotary" in caplog.text
    assert "converting" not in caplog.text


def test_a_tied_head_that_is_stored_too_changes_nothing(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = saved
    rewrite(folder, expected | {"lm_head.weight": expected["model.embed_tokens.weight"].clone()})
    assert_same(read_all(folder), expected)


@pytest.mark.parametrize("as_bin", [True, False])
def test_tied_parameters_with_two_values_are_refused(
    saved: tuple[Path, dict[str, Tensor]], as_bin: bool
) -> None:
    folder, tensors = saved
    rewrite(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, as_bin=as_bin)
    with pytest.raises(ConfigError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        read_all(folder)


@pytest.mark.parametrize("layout", ["safetensors", "older names", "bin"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_quantised_weights_are_refused(
    saved: tuple[Path, dict[str, Tensor]], dtype: torch.dtype, layout: str
) -> None:
    folder, tensors = saved
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    if layout == "older names":
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    rewrite(folder, tensors, as_bin=layout == "bin")
    with pytest.raises(ConfigError, match=r"norm\.weight is stored as .*quantised"):
        read_all(folder)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("content", [[1, 2], {"model.norm.weight": "text"}, Path("/"), None])
def test_a_bin_file_of_something_else_is_refused(
    saved: tuple[Path, dict[str, Tensor]], content: object, legacy: bool
) -> None:
    rewrite(saved[0], {})
    (saved[0] / "model.safetensors").unlink()
    path = saved[0] / "pytorch_model.bin"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    if content is None:
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        read_all(saved[0])


def test_masks_of_older_files_are_no_quantised_weights(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = saved
    mask = {"model.layers.0.self_attn.bias": torch.ones(2, 2, dtype=torch.uint8)}
    rewrite(folder, expected | mask, as_bin=True)
    assert_same(read_all(folder), expected)


@pytest.mark.parametrize("index", ["5", '{"weight_map": 5}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_odd_index_is_refused(saved: tuple[Path, dict[str, Tensor]], index: str) -> None:
    (saved[0] / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        read_all(saved[0])


@pytest.mark.parametrize("lost", ["model.norm.weight", "lm_head.weight", "norm.weight"])
def test_an_index_of_a_tensor_that_its_file_lacks_is_refused(
    saved: tuple[Path, dict[str, Tensor]], lost: str
) -> None:
    """It is a weight of the model, a head that is compared with the embedding, or one to be converted."""
    index = saved[0] / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    if lost == "norm.weight":
        del places["model.norm.weight"]
    places[lost] = places["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ConfigError, match=rf"safetensors does not hold {lost}, but .* copy both again"):
        read_all(saved[0])


@pytest.mark.parametrize("as_bin", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"no weight model.norm.weight"),
        ("shape", r"model.norm.weight has the shape \[31\], but \[32\] by config.json"),
    ],
)
def test_wrong_weights_are_named(
    saved: tuple[Path, dict[str, Tensor]], as_bin: bool, change: str, message: str
) -> None:
    folder, tensors = saved
    norm = tensors.pop("model.norm.weight")
    if change == "shape":
        tensors["model.norm.weight"] = norm[:-1].clone()
    rewrite(folder, tensors, as_bin=as_bin)
    with pytest.raises(ConfigError, match=f"model.path: .*{message}"):
        read_all(folder)


@pytest.mark.parametrize("as_bin", [True, False])
def test_stored_dtype_is_kept(saved: tuple[Path, dict[str, Tensor]], as_bin: bool) -> None:
    folder, expected = saved
    rewrite(folder, {name: value.bfloat16() for name, value in expected.items()}, as_bin=as_bin)
    assert {value.dtype for value in read_all(folder).values()} == {torch.bfloat16}


@pytest.mark.parametrize("as_bin", [True, False])
def test_mixed_dtypes_are_not_rounded(saved: tuple[Path, dict[str, Tensor]], as_bin: bool) -> None:
    """The first tensor of the file is narrower than the others."""
    folder, expected = saved
    halved = {"model.embed_tokens.weight": expected["model.embed_tokens.weight"].bfloat16()}
    tensors = {name if as_bin else name.removeprefix("model."): v for name, v in (expected | halved).items()}
    rewrite(folder, tensors, as_bin=as_bin)
    assert_same(read_all(folder), expected | {name: value.float() for name, value in halved.items()})


PART = (slice(3, 8), slice(0, 16))


class PartsOnly:
    """A safetensors file that can only return parts of a tensor, and records which parts are read."""

    def __init__(self, file: Any, asked: list[Any]) -> None:
        self.file, self.asked = file, asked

    def get_slice(self, name: str) -> Any:
        stored, asked = self.file.get_slice(name), self.asked

        class Slice:
            get_shape = staticmethod(stored.get_shape)
            get_dtype = staticmethod(stored.get_dtype)

            def __getitem__(self, index: Any) -> Tensor:
                asked.append((name, index))
                return stored[index]

        return Slice()


def test_only_the_part_asked_for_is_read(
    saved: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors maps the file and copies only the slice that is read."""
    folder, expected = saved
    asked: list[Any] = []
    monkeypatch.setattr(pretrained, "open_file", lambda path: PartsOnly(safe_open(path, "pt"), asked))
    part = ModelSpec(path=str(folder), init="pretrained").weights(0)("model.embed_tokens.weight", PART)
    assert torch.equal(part, expected["model.embed_tokens.weight"][3:8, :16])
    assert asked == [("model.embed_tokens.weight", PART)]


@pytest.mark.parametrize("kind", ["stored", "converted", "random"])
def test_a_part_is_that_part_of_the_whole(saved: tuple[Path, dict[str, Tensor]], kind: str) -> None:
    folder, expected = saved
    if kind == "converted":
        rewrite(folder, expected, as_bin=True)
    weights = ModelSpec(path=str(folder), init="random" if kind == "random" else "pretrained").weights(0)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights(name, PART), weights(name)[3:8, :16])
    assert weights(name, PART).shape == (5, 16)
    assert weights(name, (slice(32, 32), slice(0, 16))).shape == (0, 16)
    assert torch.equal(weights("model.norm.weight", (slice(1, 9),)), weights("model.norm.weight")[1:9])


# ---- random weights


def random(architecture: dict[str, Any], seed: int = 0, **changes: Any) -> tuple[list[str], WeightSource]:
    spec = ModelSpec(architecture=architecture | changes)
    return list(named_shapes(spec.build(spec.config()))), spec.weights(seed)


@family
def test_distributions_are_those_of_transformers(architecture: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelSpec(architecture=architecture).config()
    expected = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    names, weights = random(architecture)
    assert names == list(expected)
    for name, reference in expected.items():
        drawn = weights(name)
        assert drawn.dtype is torch.float32
        assert drawn.shape == reference.shape
        # The standard deviation of n samples has a relative error of 1 / sqrt(2 n); both are such estimates.
        tolerance = 6 / reference.numel() ** 0.5
        assert drawn.std().item() == pytest.approx(reference.std().item(), rel=tolerance, abs=1e-9), name
        assert abs((drawn.mean() - reference.mean()).item()) <= tolerance * reference.std().item() + 1e-9, (
            name
        )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_value_depends_on_seed_and_name_alone(name: str) -> None:
    architecture = FAMILIES[name]
    names, weights = random(architecture)
    forwards = {n: weights(n) for n in names}
    assert_same({n: weights(n) for n in reversed(names)}, dict(reversed(forwards.items())))
    deeper_names, deeper = random(architecture, num_hidden_layers=5)
    assert set(names) < set(deeper_names)
    assert_same({n: deeper(n) for n in names}, forwards)
    drawn = [n for n in names if forwards[n].std() > 0]
    _, other = random(architecture, seed=1)
    assert drawn
    assert not any(torch.equal(other(n), forwards[n]) for n in drawn)
    assert not torch.equal(
        weights("model.layers.0.self_attn.q_proj.weight"), weights("model.layers.1.self_attn.q_proj.weight")
    )


def test_depth_scaled_initialisers_of_outer_modules_are_heard() -> None:
    _, weights = random(FAMILIES["gpt2"], n_layer=32)
    ratio = (
        weights("transformer.h.0.attn.c_proj.weight").std() / weights("transformer.h.0.mlp.c_fc.weight").std()
    )
    assert ratio.item() == pytest.approx(1 / 8, rel=0.1)  # 1 / sqrt(2 * 32)


def test_padding_rows_are_zero() -> None:
    embedding = random(FAMILIES["llama"])[1]("model.embed_tokens.weight")
    assert embedding.norm(dim=1).eq(0).nonzero().tolist() == [[5]]


def test_global_random_state_is_not_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    names, weights = random(FAMILIES["qwen3"])
    first = weights(names[0])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(weights(names[0]), first)


def test_the_recipe_stays_virtual() -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    model = spec.build(spec.config())
    weights = random_weights(model, 0)
    for name in named_shapes(model):
        weights(name)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_parameter_without_an_initial_value_is_an_error() -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    model = spec.build(spec.config())
    model.model.norm.gate = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"no initial value for model.norm.gate"):
        random_weights(model, 0)("model.norm.gate")


# ---- names, signatures, buffers, export


def test_tied_parameters_are_named_once() -> None:
    for tied, name in ((True, "qwen3"), (False, "llama")):
        spec = ModelSpec(architecture=FAMILIES[name])
        shapes = named_shapes(spec.build(spec.config()))
        assert shapes["model.embed_tokens.weight"] == (96, 32)
        assert ("lm_head.weight" in shapes) is not tied


def test_signatures_tell_models_apart() -> None:
    def of(**changes: Any) -> str:
        spec = ModelSpec(architecture=FAMILIES["qwen3"] | changes)
        return shape_hash(spec.build(spec.config()))

    assert of() == of(rms_norm_eps=1e-5)
    assert len({of(), of(hidden_size=64), of(num_hidden_layers=3), of(tie_word_embeddings=False)}) == 4


@family
def test_buffers_are_float32_and_parameters_are_kept(architecture: dict[str, Any]) -> None:
    spec = ModelSpec(architecture=architecture)
    config = spec.config()
    expected = {name: b.clone() for name, b in AutoModelForCausalLM.from_config(config).named_buffers()}
    model = spec.build(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(7)
    materialize_buffers(model, torch.device("cpu"))
    assert_same(dict(model.named_buffers()), expected)
    assert all(bool((p == 7).all()) for p in model.parameters())


@family
def test_a_sharded_model_is_filled_the_same_way(architecture: dict[str, Any]) -> None:
    spec = ModelSpec(architecture=architecture)
    expected = loaded(spec, spec.weights(0))
    logits(expected).square().mean().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = spec.build(spec.config())
        fully_shard(model)
        model.to_empty(device="cpu")
        materialize_buffers(model, torch.device("cpu"))
        weights = spec.weights(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.to_local().copy_(weights(name))
        logits(model.eval()).square().mean().backward()
        assert {n: p.shape for n, p in model.named_parameters()} == named_shapes(expected)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    finally:
        dist.destroy_process_group()


def test_a_buffer_nobody_computes_is_an_error() -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    model = spec.build(spec.config())
    model.model.norm.register_buffer("mystery", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match=r"buffer model.norm.mystery"):
        materialize_buffers(model, torch.device("cpu"))


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_is_read_by_transformers(tmp_path: Path, shard_bytes: int, dtype: torch.dtype) -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    names = list(named_shapes(spec.build(spec.config())))
    weights = spec.weights(0)
    expected = {name: weights(name).to(dtype) for name in names}
    export_folder(spec, expected.items(), tmp_path, dtype, shard_bytes=shard_bytes)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert model.config.use_cache
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert_same({name: p.detach() for name, p in model.named_parameters()}, expected)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) is (shard_bytes == 20_000)
    assert sum(len(load_file(file)) for file in files) == len(names)
    assert files[0].stat().st_mode == (tmp_path / "config.json").stat().st_mode


@pytest.mark.parametrize("sizes", [(2**30, 20_000), (20_000, 2**30)], ids=["more files", "fewer files"])
def test_a_second_export_leaves_no_weights_of_the_first(tmp_path: Path, sizes: tuple[int, int]) -> None:
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    (tmp_path / ".shard-3-0").write_text("of an export that was killed")
    shapes = named_shapes(spec.build(spec.config()))
    for value, shard_bytes in enumerate(sizes):
        tensors = {name: torch.full(shape, float(value)) for name, shape in shapes.items()}
        export_folder(spec, tensors.items(), tmp_path, torch.float32, shard_bytes=shard_bytes)
    files = [*tmp_path.glob("*.safetensors")]
    assert {float(t.mean()) for file in files for t in load_file(file).values()} == {1.0}
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert not [*tmp_path.glob(".shard*")]


def export_by_turns(path: Path) -> None:
    """Export on three ranks: one writes a file of two tensors, one nothing, and one two files."""
    init_process_group("cpu")
    spec = ModelSpec(architecture=FAMILIES["qwen3"])
    rank = dist.get_rank()
    names = [["a", "b"], [], ["c", "d"]][rank]
    tensors = [(name, torch.full((2 + 2 * rank,), float(rank))) for name in names]
    export_folder(spec, tensors, path, torch.float32, shard_bytes=16)


def test_every_rank_writes_what_it_has(tmp_path: Path) -> None:
    ranks = Ranks(3)
    ranks.run(export_by_turns, tmp_path)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*files, "config.json", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": files[0], "b": files[0], "c": files[1], "d": files[2]}
    assert index["metadata"]["total_size"] == 4 * (2 + 2 + 6 + 6)
    assert load_file(tmp_path / files[2])["d"].tolist() == [2.0] * 6


def failed_exports(path: Path) -> list[str]:
    """Export on two ranks, of which one fails; return the errors of this rank."""
    init_process_group("cpu")
    spec, rank = ModelSpec(architecture=FAMILIES["qwen3"]), dist.get_rank()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":  # the first file is written after two
            dist.barrier()  # as if the tensors were gathered
            yield name, torch.ones(2)

    def export(kind: str) -> None:
        if kind == "model":
            export_folder(spec, tensors(), path, torch.float32, shard_bytes=8)
        else:
            export_adapter(LoRA(), spec, tensors(), path)

    found = []
    full = OSError(28, "full", "file")
    for kind, failing, function, error in (
        ("model", 1, "models.export.hf_folder.write_safetensors", full),
        ("model", 0, "models.export.hf_folder.write_configs", ConfigError("wrong")),
        ("adapter", 1, "models.export.hf_folder.write_safetensors", full),
        ("adapter", 0, "adapters.peft_export.load_file", ValueError("odd")),
    ):
        patched = mock.patch(f"components.{function}", side_effect=error)
        failed = pytest.raises((OSError, ValueError, RuntimeError))
        with patched if rank == failing else nullcontext(), failed as caught:
            export(kind)
        found.append(f"{caught.type.__name__}: {caught.value}")
    return found


def test_an_export_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """Every rank iterates over all of its tensors, because that may gather them."""
    full = "OSError: [Errno 28] full: 'file'"
    alike = [full, "ConfigError: wrong", full]
    here, other = Ranks(2).run(failed_exports, tmp_path, seconds=20)
    assert here == [*alike, "ValueError: odd"]
    assert other == [*alike, "RuntimeError: ValueError: odd"]


def test_an_error_while_tensors_are_gathered_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait in that collective, and would not answer in another one."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "model.norm.weight", torch.ones(32)
        raise MemoryError("gathering")

    monkeypatch.setattr(dcp, "all_gather_objects", pytest.fail)
    with pytest.raises(MemoryError, match="gathering"):
        export_folder(ModelSpec(architecture=FAMILIES["qwen3"]), tensors(), tmp_path, torch.float32)


def test_a_generation_config_comes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = AutoModelForCausalLM.from_config(ModelSpec(architecture=FAMILIES["qwen3"]).config())
    model.generation_config = GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=[7, 8])
    model.save_pretrained(source)
    spec = ModelSpec(path=str(source), init="pretrained")
    export_folder(spec, [("model.norm.weight", torch.ones(32))], target, torch.float32)
    exported = GenerationConfig.from_pretrained(target)
    assert (exported.temperature, exported.eos_token_id) == (0.5, [7, 8])
    (source / "generation_config.json").unlink()
    export_folder(spec, [("model.norm.weight", torch.ones(32))], tmp_path / "none", torch.float32)
    assert not (tmp_path / "none" / "generation_config.json").exists()


def test_an_export_without_code_names_none(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    spec, target = ModelSpec(path=str(folder), init="pretrained"), tmp_path / "target"
    ModelSpec(architecture=FAMILIES["qwen3"]).load_tokenizer().save_pretrained(folder)
    configs = ("config.json", "tokenizer_config.json")
    for name in configs:
        own = {"auto_map": {"AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}}
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | own))
    export_folder(spec, tensors.items(), target, torch.float32)
    spec.add_tokenizer(target)
    assert not any("auto_map" in (target / name).read_text() for name in configs)


@pytest.mark.parametrize(
    ("stops", "expected"), [([7, 2], [7, 2]), ([7, 8], [2, 7, 8]), (7, [2, 7]), (None, 2), ([2], [2])]
)
def test_stop_tokens_of_the_model_stay(tmp_path: Path, stops: Any, expected: list[int] | int) -> None:
    """They are kept besides the tokenizer's, as are sampling options that transformers would not write."""
    tokenizer = ModelSpec(architecture=FAMILIES["qwen3"]).load_tokenizer()
    assert tokenizer.eos_token_id == 2
    (tmp_path / "config.json").write_text("{}")
    brought = {"temperature": 0.5, "top_p": 0.9, "eos_token_id": stops}
    (tmp_path / "generation_config.json").write_text(json.dumps(brought))
    add_tokenizer(tmp_path, tokenizer)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.5, 0.9)
    assert written["eos_token_id"] == expected
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == expected


@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
def test_stop_tokens_without_a_generation_config(tmp_path: Path, kind: str) -> None:
    """The model's are kept, and that of the chat template is added; only a classifier's config has a pad."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokenizer.eos_token = "<|im_start|>"  # the template ends a turn with another token, <|im_end|>
    config = {"eos_token_id": [7, 8], "architectures": [f"Qwen3For{kind}"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    add_tokenizer(tmp_path, tokenizer)
    pad = {"pad_token_id": 0} if kind == "SequenceClassification" else {}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == config | {"eos_token_id": [1, 7, 8], "bos_token_id": None} | pad
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.pad_token_id) == ([1, 2, 7, 8], 0)
    model = AutoModelForCausalLM.from_config(ModelSpec(architecture=FAMILIES["qwen3"]).config())
    use_plain_decoding(model, tokenizer)
    assert model.generation_config.eos_token_id == [1, 2]
