"""Adapters have the parameters of peft's, are read from folders, and refuse invalid settings."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from components.adapters import LoRA, export_adapter, lora
from components.adapters.merge import base_of, merge_adapter
from components.adapters.peft_export import peft_config
from components.adapters.peft_folder import adapter_overrides, name_base
from components.contracts.errors import ConfigError
from components.models import ModelSpec, nf4
from components.models.generate import amend
from tests.distributed.cases import spec

SETTINGS: dict[str, Any] = {
    "path": None,
    "r": 4,
    "alpha": 8.0,
    "target_modules": "all-linear",
    "rslora": False,
    "modules_to_save": None,
    "dropout": 0.0,
    "init_lora_weights": "kaiming",
    "pissa_niter": None,
    "dora": False,
    "quantize": None,
}
READ = dict.fromkeys(("r", "alpha", "target_modules", "rslora", "modules_to_save", "init_lora_weights"))


def described(**changes: Any) -> LoRA:
    return lora(**SETTINGS | changes)


def trained_by_peft(model: nn.Module, config: LoraConfig) -> dict[str, torch.Size]:
    inject_adapter_in_model(config, model)
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name.replace(".modules_to_save", "").replace(".default", ""): p.shape for name, p in named}


@pytest.mark.parametrize(
    ("family", "target", "words"),
    [
        ("qwen3", "all-linear", "all-linear"),
        ("phi3", "all-linear", "all-linear"),
        ("qwen3", "attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("phi3", "attention", ["qkv_proj", "o_proj"]),
        ("latent", "attention", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
        ("gemma", "mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3", ("v_proj", "layers.1.mlp.up_proj"), ["v_proj", "layers.1.mlp.up_proj"]),
    ],
)
def test_what_is_adapted_is_what_peft_adapts(family: str, target: Any, words: Any) -> None:
    """Names, shapes and order equal peft's, for peft's own configuration and for the one we write for it."""
    description, here = spec(family), described(target_modules=target)
    ours = here.shapes(description.build(description.config()))
    config = LoraConfig(r=4, target_modules=words, task_type="CAUSAL_LM")
    model = description.build(description.config())
    written = peft_config(here, model)
    assert trained_by_peft(model, config) == ours
    assert trained_by_peft(description.build(description.config()), written) == ours
    assert list(ours) == list(dict.fromkeys(ours))


def test_modules_that_are_trained_whole() -> None:
    description = spec("llama")
    model = description.build(description.config())
    adapter = described(target_modules="attention", modules_to_save=("lm_head", "norm"))
    ours = adapter.shapes(model)
    assert adapter.saved(model) == ["model.norm", "lm_head"]
    assert {name: shape for name, shape in ours.items() if "lora" not in name} == {
        "model.norm.weight": (32,),
        "lm_head.weight": (160, 32),
    }
    # Whole names are written, since peft matches suffixes: "norm" would match "q_norm" too.
    assert trained_by_peft(model, peft_config(adapter, model)) == ours


def test_initial_values_are_a_function_of_seed_and_name() -> None:
    """Slices have the values of the whole; ``A`` is within the bound of torch's linear layers, ``B`` is 0."""
    description, adapter = spec("qwen3"), described(dora=True)
    model, base = description.build(description.config()), description.weights(0)
    first, again = (adapter.weights(model, seed, base) for seed in (3, 3))
    other = adapter.weights(model, 4, base)
    name = "model.layers.0.mlp.down_proj"
    a = first(f"{name}.lora_A.weight")
    assert torch.equal(again(f"{name}.lora_A.weight", (slice(1, 3),)), a[1:3])
    assert not torch.equal(other(f"{name}.lora_A.weight"), a)
    assert not torch.equal(first("model.layers.1.mlp.down_proj.lora_A.weight"), a)
    bound = 48**-0.5
    assert 0.9 * bound < a.abs().max() <= bound
    assert not first(f"{name}.lora_B.weight").any()
    lengths = base(f"{name}.weight").norm(dim=1)
    torch.testing.assert_close(first(f"{name}.lora_magnitude_vector"), lengths)
    spread = described(init_lora_weights="gaussian").weights(model, 3, base)(f"{name}.lora_A.weight").std()
    assert 0.15 < spread < 0.35  # 1 / r


def random_tensors(adapter: LoRA, description: ModelSpec) -> dict[str, Tensor]:
    shapes = adapter.shapes(description.build(description.config()))
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    adapter = described(target_modules="attention", rslora=True)
    export_adapter(adapter, spec("qwen3"), random_tensors(adapter, spec("qwen3")).items(), path)
    return path


def continued(path: Path, **changes: Any) -> LoRA:
    return described(**READ | {"path": str(path)} | changes)


def test_all_files_of_an_export_have_one_mode(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").touch()  # its mode is that of the umask
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_a_kill_leaves_an_earlier_export_as_it_was(folder: Path, tmp_path: Path) -> None:
    """The next export also removes the files of a rank that it does not have."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / ".shard-7-0").touch()
    adapter, description = described(target_modules="attention", rslora=True), spec("qwen3")
    tensors = {name: torch.zeros_like(value) for name, value in random_tensors(adapter, description).items()}

    def killed(_: object, path: Path) -> None:
        path.write_bytes(b"cut off")
        raise KeyboardInterrupt

    with (
        mock.patch("components.adapters.peft_export.write_safetensors", side_effect=killed),
        pytest.raises(KeyboardInterrupt),
    ):
        export_adapter(adapter, description, tensors.items(), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    assert weights.read_bytes() == (folder / weights.name).read_bytes()
    export_adapter(adapter, description, tensors.items(), tmp_path)
    assert not any(value.any() for value in load_file(weights).values())
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}


def test_a_kill_while_the_settings_are_written_leaves_earlier_ones(folder: Path, tmp_path: Path) -> None:
    """Those of the export, of its quantisation and, at the end, of its base model."""
    adapter, description = described(target_modules="attention", r=2, quantize="nf4"), spec("qwen3")
    export_adapter(adapter, description, random_tensors(adapter, description).items(), tmp_path)
    written = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", nf4.CONFIG)}
    other = described(target_modules="all-linear", quantize="nf4")
    tensors = random_tensors(other, description)
    for write in (
        lambda: export_adapter(other, description, tensors.items(), tmp_path),
        lambda: nf4.write_quantization_config(tmp_path, ["lm_head"]),
        lambda: name_base(tmp_path, tmp_path / "base"),
    ):
        with mock.patch("os.fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            write()
        assert {name: (tmp_path / name).read_bytes() for name in written} == written


def test_a_folder_is_read_as_it_was_written(folder: Path) -> None:
    description = spec("qwen3")
    model, adapter = description.build(description.config()), continued(folder)
    adapter.check(model)
    assert adapter.scaling == 8 / 4**0.5
    weights = adapter.weights(model, 0, description.weights(0))
    for name, value in random_tensors(adapter, description).items():
        assert torch.equal(weights(name), value)
        assert torch.equal(weights(name, (slice(0, 2), slice(1, 3))), value[:2, 1:3])
    assert adapter.shape_hash(model) == described(target_modules="attention", rslora=True).shape_hash(model)
    assert adapter.shape_hash(model) != described(target_modules="attention").shape_hash(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 33}, "adapter.r: 33 is larger than the smaller side of .*self_attn.q_proj .* at most 32"),
        ({"r": 0}, "adapter.r: must be at least 1"),
        ({"r": None}, "adapter.r: is null; set it, or give an adapter.path"),
        ({"alpha": 0.0}, "adapter.alpha: must be above 0"),
        ({"dropout": 1.0}, "adapter.dropout: must be at least 0 and below 1"),
        (
            {"target_modules": ("q_prj",)},
            "adapter.target_modules: 'q_prj' matches no module of qwen3. Did you mean q_proj",
        ),
        (
            {"target_modules": ()},
            "adapter.target_modules: an empty list matches no linear layer of qwen3; .* q_proj,",
        ),
        (
            {"target_modules": ("norm",)},
            "adapter.target_modules: model.norm is a Qwen3RMSNorm; only linear layers.*merge_and_unload",
        ),
        (
            {"target_modules": ("lm_head",)},
            "lm_head is the output head, .*modules_to_save=.*, or if .* merge .* peft's merge_and_unload",
        ),
        ({"modules_to_save": ("embed_tokens",)}, "modules_to_save: model.embed_tokens is tied"),
        ({"modules_to_save": ("q_proj",)}, "self_attn.q_proj is adapted too"),
        ({"modules_to_save": ("mlp",)}, "mlp is not a single module"),
        ({"quantize": "nf4", "dora": True}, "adapter.quantize: .*adapter.dora; use adapter.quantize=null"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(changes: dict[str, Any], message: str) -> None:
    description = spec("qwen3")
    with pytest.raises(ConfigError, match=message):
        described(**changes).check(description.build(description.config()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "adapter.r: is 8, but the adapter at adapter.path=.* has 4; leave it out"),
        ({"dora": True}, "adapter.dora: is True, .* has False; use adapter=lora"),
        ({"init_lora_weights": "gaussian"}, "adapter.init_lora_weights: is not read with adapter.path"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        continued(folder, **changes)


def test_an_adapter_of_a_quantised_model_is_not_trained_on_another(folder: Path, tmp_path: Path) -> None:
    quantised = shutil.copytree(folder, tmp_path / "quantised")
    (quantised / nf4.CONFIG).write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter\.path: .* base model in 4 bits; use adapter=qlora"):
        continued(quantised)
    assert continued(quantised, quantize="nf4").quantize == "nf4"
    assert continued(folder, quantize="nf4").quantize == "nf4", "peft's own folders do not say it"


def test_adapters_as_peft_saves_them(folder: Path, tmp_path: Path) -> None:
    """For a classifier, peft names the heads of all architectures; EVA leaves the base model unchanged."""
    config = json.loads((folder / "adapter_config.json").read_text())
    theirs = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    eva = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | theirs | eva))
    tensors = load_file(folder / "adapter_model.safetensors")
    score = {"base_model.model.score.weight": torch.ones(1, 32)}
    save_file(tensors | score, tmp_path / "adapter_model.safetensors")
    assert continued(tmp_path).modules_to_save == ("score",)
    with pytest.raises(ConfigError, match=r"adapter\.path: .* of a reward model, .*; use stage=rm"):
        continued(tmp_path).check(spec("qwen3").meta_model)


def test_what_peft_saves_but_has_not_trained_is_not_trained(folder: Path, tmp_path: Path) -> None:
    """Its option ``save_embedding_layers`` also writes frozen embeddings."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, embedding = load_file(folder / "adapter_model.safetensors"), torch.ones(64, 32)
    save_file(
        tensors | {"base_model.model.model.embed_tokens.weight": embedding},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"model\.embed_tokens, which is not in its modules_to_save"):
        continued(tmp_path)
    save_file({"other": embedding}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"has no adapter of a module .*base_model\.model\."):
        continued(tmp_path)


def test_a_module_trained_in_full_is_not_in_4_bits(tmp_path: Path) -> None:
    """transformers loads the base with the settings of the export, and peft the adapter on it."""
    description, saved = spec("llama"), "model.layers.1.mlp.up_proj"
    adapter = described(target_modules=("q_proj",), modules_to_save=(saved,), quantize="nf4")
    export_adapter(adapter, description, random_tensors(adapter, description).items(), tmp_path / "a")
    description.build(description.config()).to_empty(device="cpu").save_pretrained(tmp_path / "b")
    settings = json.loads((tmp_path / "a" / nf4.CONFIG).read_text())
    coarse = BitsAndBytesConfig(**settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "b", quantization_config=coarse, device_map="cpu")
    trained = PeftModel.from_pretrained(base, tmp_path / "a").base_model.model
    linear = {name for name, module in trained.named_modules() if type(module) is nn.Linear}
    kept = {name for name in linear if "lora" not in name}
    assert kept == {"lm_head", f"{saved}.original_module", f"{saved}.modules_to_save.default"}


def test_a_base_in_a_folder_has_no_revision(folder: Path, tmp_path: Path) -> None:
    """Not even in a folder written before ``name_base`` removed that of the initial model."""
    shutil.copytree(folder, tmp_path / "new")
    amend(tmp_path / "new" / "adapter_config.json", {"revision": "v1"})
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    name_base(tmp_path / "new", tmp_path)
    assert json.loads((tmp_path / "new" / "adapter_config.json").read_text())["revision"] is None
    for named, revision in ((str(tmp_path), None), ("team/model", "v1")):
        amend(tmp_path / "old" / "adapter_config.json", {"base_model_name_or_path": named})
        assert base_of(str(tmp_path / "old"), None, trust_remote_code=False).revision == revision
        assert adapter_overrides(tmp_path / "old").get("model.revision") == revision


def test_a_merge_names_the_base_model_that_is_missing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "adapter")
    name_base(tmp_path / "adapter", tmp_path / "gone")
    message = r"^adapter=.*base model cannot be read \(.*gone.*\) Give base=DIR, or correct base_model_name"
    with pytest.raises(ConfigError, match=message):
        merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    with pytest.raises(ConfigError, match=r"^base=/nope: cannot be read \(.*no such folder.*\)$"):
        merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "merged"), base="/nope")


@pytest.mark.parametrize("changes", [{"target_modules": "mlp"}, {"modules_to_save": ("lm_head",)}], ids=str)
def test_an_export_is_continued_with_the_same_modules(tmp_path: Path, changes: dict[str, Any]) -> None:
    """They may be asked for in other words or in another order than the folder has them."""
    own: dict[str, Any] = {"target_modules": "attention", "modules_to_save": ("norm", "lm_head")}
    description = spec("llama")
    adapter = described(**own)
    export_adapter(adapter, description, random_tensors(adapter, description).items(), tmp_path)
    for same in (own, {"target_modules": ("o_proj", "k_proj", "v_proj", "q_proj")}):
        continued(tmp_path, **same).check(description.meta_model)
    with pytest.raises(ConfigError, match=r"other modules than .* leave out adapter\.target_modules and"):
        continued(tmp_path, **own | changes).check(description.meta_model)


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    deep, config = spec("deep"), json.loads((folder / "adapter_config.json").read_text())
    with pytest.raises(ConfigError, match=r"lacks .*layers\.2.* \(24 missing, 0 too many\); .*another model"):
        continued(folder).check(deep.build(deep.config()))
    wide = ModelSpec(architecture=(spec("qwen3").architecture or {}) | {"num_attention_heads": 8})
    with pytest.raises(ConfigError, match=r"q_proj.lora_B.weight is \[32, 4\], .* needs \[64, 4"):
        continued(folder).check(wide.build(wide.config()))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigError, match=r"rank_pattern=.* is not supported.* merge_and_unload"):
        continued(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(ConfigError, match="init_lora_weights=pissa_niter_4, peft changes the weights"):
        continued(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="is a IA3 adapter"):
        continued(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(tensors | {"other": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    qwen = spec("qwen3")
    with pytest.raises(ConfigError, match="has the unexpected other"):
        continued(tmp_path).check(qwen.build(qwen.config()))
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        continued(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", "four"),
        ("lora_alpha", "much"),
        ("target_modules", [1, 2]),
        ("use_dora", "perhaps"),
    ],
)
def test_a_setting_of_another_type_is_named(folder: Path, tmp_path: Path, key: str, value: object) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=rf"^adapter\.path: .*adapter_config\.json: {key}.*; correct it\.$"):
        continued(tmp_path)


def test_frozen_parameters_want_no_gradient() -> None:
    architecture = spec("qwen3").architecture
    frozen = ModelSpec(architecture=architecture, freeze=("lm_head.*", "*.layers.0.mlp.*"))
    model = frozen.build(frozen.config())
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mlp = {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert still == mlp | {"model.embed_tokens.weight"}  # tied
    assert frozen.trained_shape_hash(model) != frozen.shape_hash(model) == spec("qwen3").shape_hash(model)
    others = ModelSpec(architecture=architecture, train_only=("lm_head.*", "*.layers.0.mlp.*"))
    trained = {name for name, p in others.build(others.config()).named_parameters() if p.requires_grad}
    assert trained == still
    for keys, message in (
        ({"freeze": ("x.*",)}, "freeze: 'x.*' matches no parameter"),
        ({"freeze": ("*",)}, "freeze.* leaves nothing to train"),
        ({"train_only": ("*.layers.0.*", "x.*")}, "train_only: 'x.*' matches no parameter"),
    ):
        bad = ModelSpec(architecture=architecture, **keys)
        with pytest.raises(ConfigError, match=message):
            bad.build(bad.config())
    with pytest.raises(
        ConfigError, match=r"model\.freeze, model\.train_only: an adapter freezes the whole model"
    ):
        described().check(model)
