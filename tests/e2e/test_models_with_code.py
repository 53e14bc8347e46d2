"""A model whose folder brings its own code, from training to an export that transformers loads."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from components.contracts.errors import ConfigError
from components.data.tokenizer import PATH
from runner.commands.export import export
from tests.e2e.commands import EXPORTING, call_here, run_here

CODE = {
    "configuration_own.py": """from transformers import Qwen3Config
class OwnConfig(Qwen3Config):
    model_type = "own_qwen3"
""",
    "modeling_own.py": """from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
TRAINING = tuple(option for option in EXPORTING if not option.startswith("model."))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=8192, **size, **heads)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PATH).save_pretrained(folder)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    named = {"model_type": "own_qwen3", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(config | named))
    return folder


def test_the_export_contains_the_code(folder: Path, tmp_path: Path) -> None:
    """The completion at the end of a run reads the export, too."""
    own = ("model=hf", f"model.path={folder}", "model.trust_remote_code=true")
    run = run_here(tmp_path, *own, *TRAINING)
    model = AutoModelForCausalLM.from_pretrained(run / "export", trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    before, after = (load_file(place / "model.safetensors") for place in (folder, run / "export"))
    assert before.keys() == after.keys()
    assert not before["model.norm.weight"].equal(after["model.norm.weight"])


def test_code_is_not_run_without_permission(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_here(f"run.output_dir={tmp_path}", "model=hf", f"model.path={folder}", *TRAINING) == 2
    assert "brings its own model code; read it" in capsys.readouterr().err


def test_an_adapter_is_merged_into_a_model_with_code(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    words = [f"adapter={tmp_path}/adapter", "merge=true", f"output={tmp_path}/merged"]
    with pytest.raises(ConfigError, match="brings its own model code; read it"):
        export(words)
    export([*words, "trust_remote_code=true"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    assert type(merged).__name__ == "OwnForCausalLM"
