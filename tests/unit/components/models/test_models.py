"""Model descriptions: published shapes, the files they are read from, and the settings they refuse."""

import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from components.contracts.errors import ConfigError
from components.data.tokenizer import PATH
from components.models import ModelSpec, hub, named_shapes
from components.optimizers import TorchClass
from runner.config.instantiate import build_component
from runner.config.sources import ConfigSources

CONF = Path(__file__).parents[4] / "conf"
TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": True,
}


INDEX = "model.safetensors.index.json"
CONFIGS = ("config", "generation_config")
WINDOWS = ["sliding_attention"] * 2


def composed(group: str, option: str) -> Any:
    """Return one option of a group, composed with the options that it is derived from."""
    chosen = f"{group}=[{option}]" if group == "logger" else f"{group}={option}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", [chosen])[group])


def from_yaml(name: str, **changes: Any) -> ModelSpec:
    values = composed("model", name)
    assert values["_target_"] == "components.models.ModelSpec"
    spec = build_component("model", values | changes, ConfigSources())
    assert isinstance(spec, ModelSpec)
    return spec


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the folder of a tiny Qwen3, saved by transformers."""
    spec = ModelSpec(architecture=TINY)
    AutoModelForCausalLM.from_config(spec.config()).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("qwen3_8b", 8_190_735_360),
        ("llama3_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    spec = from_yaml(name)
    model = spec.build(spec.config())
    assert sum(shape.numel() for shape in named_shapes(model).values()) == parameters
    assert all(p.is_meta and p.dtype is torch.float32 for p in model.parameters())


def test_tiny_has_5m_parameters_and_divides_by_4() -> None:
    spec = from_yaml("tiny")
    config = spec.config()
    assert 4.5e6 < sum(s.numel() for s in named_shapes(spec.build(config)).values()) < 5.5e6
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert getattr(config, key) % 4 == 0


LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""config.json as Meta published it, before transformers 5 renamed the rope keys."""


def test_a_named_shape_accepts_its_published_config_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    spec = from_yaml("llama3_1b", path=str(tmp_path), init="pretrained")
    assert spec.config().eos_token_id == 128001
    edit(tmp_path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"model.architecture.num_hidden_layers: is 16, but .* has 4"):
        spec.config()
    edit(tmp_path, model_type="mistral")
    with pytest.raises(ConfigError, match=r"model.architecture.model_type: is llama, but .* is mistral"):
        spec.config()


def test_a_field_that_the_file_lacks_differs_from_one_that_is_given(tmp_path: Path) -> None:
    """transformers declares no head_dim of qwen3_moe, so that a config without it has no such attribute."""
    moe = TINY | {"model_type": "qwen3_moe"}
    without = {key: value for key, value in moe.items() if key != "head_dim"}
    (tmp_path / "config.json").write_text(json.dumps(without))
    with pytest.raises(ConfigError, match=r"model.architecture.head_dim: is 4, but .* has None"):
        ModelSpec(path=str(tmp_path), architecture=moe, init="pretrained").config()


@pytest.mark.parametrize("pad", [-1, 64])
def test_a_pad_token_outside_of_the_vocabulary_in_a_file_is_none(saved: Path, pad: int) -> None:
    """With -1, torch would not train the embedding of the last token, nor with 64 that of an added one."""
    edit(saved, pad_token_id=pad)
    spec = ModelSpec(path=str(saved))
    assert spec.config().pad_token_id is None
    assert spec.meta_model.get_input_embeddings().padding_idx is None


def test_a_window_in_a_file_of_a_model_that_has_none_is_not_read(saved: Path) -> None:
    edit(saved, model_type="llama", architectures=["LlamaForCausalLM"], layer_types=None, sliding_window=0)
    assert ModelSpec(path=str(saved)).config().model_type == "llama"


def test_training_configs_have_no_cache_and_building_leaves_them_alone() -> None:
    spec = ModelSpec(architecture=TINY)
    config = spec.config()
    before = config.to_dict()
    model = spec.build(config, attention="sdpa")
    assert config.to_dict() == before
    assert not config.use_cache
    assert not model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_outputs_that_a_folder_asks_for_are_off_in_training(saved: Path) -> None:
    """The engines read the last states by name, and the states of all layers would fill the memory."""
    edit(saved, return_dict=False, output_hidden_states=True, output_attentions=True)
    config = ModelSpec(path=str(saved)).config()
    assert (config.return_dict, config.output_hidden_states, config.output_attentions) == (True, False, False)


def test_random_init_with_an_architecture_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", None)
    spec = from_yaml("qwen3_0_6b")
    assert spec.config().num_hidden_layers == 28
    assert spec.weights(0)("model.norm.weight").tolist() == [1.0] * 1024


def test_the_shape_of_a_folder_with_random_weights(saved: Path) -> None:
    spec = ModelSpec(path=str(saved), init="random")
    assert spec.config().hidden_size == 16
    stored = ModelSpec(path=str(saved), init="pretrained").weights(0)("model.embed_tokens.weight")
    assert not torch.equal(spec.weights(0)("model.embed_tokens.weight"), stored)


@pytest.mark.parametrize("group", ["model", "optimizer", "scheduler", "logger"])
def test_yaml_files_list_every_key_of_their_class(group: str) -> None:
    """A key that a YAML file leaves out cannot be set on the command line."""
    files = sorted((CONF / group).glob("*.yaml"))
    assert files
    for file in files:
        values = composed(group, file.stem)
        values = values.get(file.stem, values)  # each logger is below its name
        module, _, name = values.pop("_target_").rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if issubclass(kind, torch.optim.Optimizer):
            shared = {"lr", "weight_decay"}
            values = {k: v for k, v in values.items() if k in shared or k not in signature(kind).parameters}
            kind = TorchClass
        # checkpoint.init_from and the stage set the first two; the others are the class and its arguments.
        elsewhere = {"initial_checkpoint", "scalar_head", "optimizer", "options"}
        assert values.keys() == {f.name for f in dataclasses.fields(kind)} - elsewhere, file


# ---- the hub


def test_a_hub_id_is_downloaded_at_its_revision(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, "model.safetensors" in allow_patterns))
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", download)
    spec = ModelSpec(path="team/downloaded", init="pretrained", revision="v1")
    assert spec.config().hidden_size == 16
    assert asked == [("team/downloaded", "v1", False)]
    assert spec.weights(0)("model.norm.weight").shape == (16,)
    assert asked[-1] == ("team/downloaded", "v1", True)


@pytest.mark.parametrize(
    "weights",
    [
        {"model.safetensors"},
        {"model-1.safetensors", "parts/2.safetensors", INDEX},
        {"pytorch_model-1.bin"},
    ],
    ids=min,
)
def test_only_the_weights_that_are_read_are_downloaded(
    weights: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.dumps({"weight_map": dict(enumerate(weights - {INDEX}))})
    copies = {"consolidated.safetensors", "onnx/model.safetensors", "training_args.bin", "original/model.bin"}

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        for name in filter_repo_objects(weights | copies, allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(index)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    folder = hub.model_folder("model.path", f"team/{min(weights)}", weights=True)
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == weights


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalEntryNotFoundError("essay"), "the hub cannot be reached, and there is no copy"),
        (OSError("disk on fire"), "disk on fire"),
        (hub.FAILURES[0]("server disconnected"), "server disconnected"),
        (None, "neither a folder nor a valid name"),
    ],
    ids=str,
)
def test_a_hub_id_that_cannot_be_had(
    error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        assert error is not None
        raise error

    if error is not None:
        monkeypatch.setattr(hub, "snapshot_download", fail)
    path = "team/model" if error else "no such name"
    with pytest.raises(ConfigError, match=rf"model.path={path}: neither a folder .*{reason}") as caught:
        ModelSpec(path=path, init="pretrained").config()
    assert "\n" not in str(caught.value)


def test_reasons_are_found_by_the_hub_s_own_types() -> None:
    kinds = [kind for kind, _ in hub.REASONS]
    assert kinds.index(RepositoryNotFoundError) > 0, "a gated model is a special case, and must come first"


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "pretrained"}, "model.path: is null, and model.init=pretrained"),
        ({}, "model.path: is null and so is model.architecture"),
        ({"path": "/", "architecture": TINY}, "model.path=/: is not read"),
        ({"revision": "v1", "architecture": TINY}, "model.revision: is not read"),
    ],
)
def test_refuses_contradictions_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec(**settings)


@pytest.mark.parametrize(
    ("path", "revision", "message"),
    [
        ("/no/such/folder", None, "model.path=/no/such/folder: no such folder"),
        ("./nowhere", None, "model.path=./nowhere: no such folder"),
        (__file__, None, "is a file; give the folder"),
        (str(Path(__file__).parent), None, "has no config.json"),
        (str(Path(__file__).parent), "v1", "model.revision: .* is a folder and has no revisions"),
    ],
)
def test_refuses_paths(path: str, revision: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec(path=path, init="pretrained", revision=revision).config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model.architecture.model_type: is missing"),
        ({"model_type": "qwen33"}, "no 'qwen33'. Did you mean .*qwen3"),
        ({"num_hiden_layers": 3}, "model.architecture.num_hiden_layers: .* Did you mean num_hidden_layers"),
        ({"hidden_size": "wide"}, "model.architecture: .*hidden_size"),
        (
            {"rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}},
            "rope_type: no 'yarm'. Did you mean yarn",
        ),
        ({"model_type": "bert", "head_dim": None}, "model.architecture.num_key_value_heads: BertConfig"),
        ({"model_type": ["qwen3"]}, r"model.architecture.model_type: transformers has no \['qwen3'\]"),
        ({"rope_parameters": {"rope_type": None}}, "rope_parameters.rope_type: no None. Use default"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters.rope_type: no \['yarn'\]"),
        ({"sliding_window": 8, "layer_types": WINDOWS}, "architecture.sliding_window: is 8, but every layer"),
        (
            {"layer_types": WINDOWS},
            r"architecture.layer_types: is \['sliding_attention', .*, but every layer",
        ),
        (
            {"model_type": "qwen3_moe", "sliding_window": 8},
            "architecture.sliding_window: is 8, but every layer",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window: is 0; use 1 or more, or null",
        ),
        ({"pad_token_id": -1}, "model.architecture.pad_token_id: is -1, but the tokens are 0 to 63"),
        ({"pad_token_id": 64}, "model.architecture.pad_token_id: is 64, but the tokens are 0 to 63"),
    ],
)
def test_refuses_architectures(changes: dict[str, Any], message: str) -> None:
    architecture = {key: value for key, value in (TINY | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        ModelSpec(architecture=architecture).config()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"model_type": "bert", "num_hidden_layers": 2}, "bert is not a causal language model"),
        ({"model_type": "t5"}, "t5 is not a causal language model"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({"model_type": "gemma2"}, "attn_logit_softcapping=50.0 of gemma2"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "final_logit_softcapping=30.0 of gemma2"),
        ({"model_type": "cohere"}, "logit_scale=0.0625 of cohere"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling=8.0 of granite"),
        ({"model_type": "bart"}, "bart is not a causal language model"),
        ({"model_type": "musicgen"}, "musicgen is not a causal language model"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "mamba mixes tokens outside"),
        ({"model_type": "modernbert-decoder"}, "modernbert-decoder computes its logits with lm_head.dense"),
        (
            {"model_type": "bert", "is_decoder": True},
            "bert computes its logits with cls.pred",
        ),
        (
            {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "lfm2 mixes",
        ),
        ({"model_type": "diffllama", "num_hidden_layers": 2}, "diffllama cannot be built without its data"),
        ({"model_type": "apertus", "num_hidden_layers": 2}, "apertus keeps model.layers.0.mlp.act_fn"),
        ({"model_type": "qwen2_moe"}, "num_experts=60 of qwen2_moe"),
        ({"model_type": "aria_text", "num_hidden_layers": 1}, "mlp.experts of aria_text: the only"),
        ({"model_type": "dory"}, "dory computes its logits with a DoryLMHead"),
        ({"model_type": "mllama"}, "has its vocabulary head inside its MllamaForCausalLM"),
    ],
)
def test_refuses_what_the_engines_do_not_compute(architecture: dict[str, Any], message: str) -> None:
    spec = ModelSpec(architecture=architecture)
    with pytest.raises(ConfigError, match=message):
        spec.build(spec.config())


def test_refuses_attention_that_no_engine_can_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "_supports_attention_backend", False)
    spec = ModelSpec(architecture=TINY)
    with pytest.raises(ConfigError, match="qwen3 mixes tokens outside"):
        spec.build(spec.config())


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "phi3", "gemma3_text", "olmo2", "starcoder2"])
def test_other_decoders_are_welcome(kind: str) -> None:
    spec = ModelSpec(architecture={"model_type": kind, "num_hidden_layers": 2})
    assert named_shapes(spec.build(spec.config()))


def test_a_scale_of_one_is_no_scale() -> None:
    assert ModelSpec(architecture={"model_type": "granite", "logits_scaling": 1.0}).config()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (TINY | {"hidden_size": -16}, "model.architecture.hidden_size: is -16"),
        (TINY | {"hidden_act": "relo"}, "transformers cannot build this qwen3: .*relo"),
    ],
)
def test_refuses_what_cannot_be_built(architecture: dict[str, Any], message: str) -> None:
    spec = ModelSpec(architecture=architecture)
    with pytest.raises(ConfigError, match=message):
        spec.build(spec.config())


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text('{\n"a": 1,\n'), r"config.json:\d: malformed JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: edit(f, model_type="qwen33"), "no model_type 'qwen33'. Did you mean"),
        (lambda f: edit(f, model_type="own", auto_map={}), "model.trust_remote_code: is false"),
        (lambda f: edit(f, hidden_size="wide"), "config.json: .*hidden_size"),
        (lambda f: edit(f, quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
        (
            lambda f: edit(f, hidden_size=32),
            r"model.embed_tokens.weight has the shape \[64, 16\], but \[64, 32\] by config.json",
        ),
        (
            lambda f: edit(f, num_hidden_layers=3, layer_types=["full_attention"] * 3),
            "no weight model.layers.2.*another model",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"torn"),
            "model.path: cannot read .*model.safetensors",
        ),
        (remove_weights, "holds no readable weights"),
        (
            lambda f: edit(f, transformers_weights="own.safetensors"),
            "transformers_weights is own.safetensors",
        ),
    ],
)
def test_refuses_damaged_folders(saved: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(saved)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelSpec(path=str(saved), init="pretrained").weights(0)
    assert str(caught.value).count("\n") < 2


# ---- tokenizers


LATER_TOKENIZER = '{"version": "1.0", "added_tokens": [], "model": {"type": "of a later version"}}'


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def test_the_tokenizer_comes_with_the_model_or_is_named(saved: Path, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokens.json").write_text("[]")  # which no tokenizer reads
    named = ModelSpec(architecture=TINY, tokenizer=str(tokenizer_folder))
    assert named.load_tokenizer().eos_token_id == 2
    with pytest.raises(ConfigError, match=r"model.path: .*has no tokenizer"):
        ModelSpec(path=str(saved), init="pretrained").load_tokenizer()
    shutil.copytree(tokenizer_folder, saved, dirs_exist_ok=True)
    for init in ("random", "pretrained"):
        assert len(ModelSpec(path=str(saved), init=init).load_tokenizer()) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [True, False])
def test_an_export_has_no_special_ids_of_another_tokenizer(
    saved: Path, tokenizer_folder: Path, tmp_path: Path, other: bool
) -> None:
    """A copy of the model's own tokenizer, as in the folder of an adapter, is not another one."""
    own = ModelSpec(architecture=TINY).load_tokenizer()
    for folder in (saved, tmp_path / "copy"):
        own.save_pretrained(folder)
    edit(saved, eos_token_id=[1, 7], pad_token_id=7)
    stops = {"eos_token_id": [1, 7], "bos_token_id": 1, "top_p": 0.9}
    (saved / "generation_config.json").write_text(json.dumps(stops))
    export = shutil.copytree(saved, tmp_path / "export")
    used = tokenizer_folder if other else tmp_path / "copy"
    ModelSpec(path=str(saved), tokenizer=str(used)).add_tokenizer(export)
    config, generation = (json.loads((export / f"{name}.json").read_text()) for name in CONFIGS)
    ends = [2] if other else [2, 1, 7]
    assert (config["eos_token_id"], generation["eos_token_id"]) == (ends, ends)
    assert (generation["bos_token_id"], generation["top_p"]) == (None if other else 1, 0.9)
    assert config["pad_token_id"] == (None if other else 7)


def test_an_unreadable_tokenizer_of_another_path_has_no_foreign_ids(
    saved: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    (saved / "tokenizer.json").write_text(LATER_TOKENIZER)
    export = shutil.copytree(saved, tmp_path / "export")
    ModelSpec(path=str(saved), tokenizer=str(tokenizer_folder)).add_tokenizer(export)
    assert (export / "tokenizer.json").read_text() == (tokenizer_folder / "tokenizer.json").read_text()


def test_random_named_shapes_take_the_embedded_tokenizer() -> None:
    assert Path(from_yaml("llama3_8b").load_tokenizer().name_or_path) == Path(PATH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"tokenizer.json:1: malformed JSON"),
        ("{}", "model.tokenizer: cannot load the tokenizer in"),
        (LATER_TOKENIZER, "model.tokenizer: cannot load the tokenizer in .* did not match any variant"),
    ],
)
def test_refuses_broken_tokenizers(tokenizer_folder: Path, text: str, message: str) -> None:
    (tokenizer_folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelSpec(architecture=TINY, tokenizer=str(tokenizer_folder)).load_tokenizer()
