import json
from pathlib import Path

from components.models.remote_code import brings_code


def test_only_folders_are_known_to_bring_no_code(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder in (model, tokenizer):
        folder.mkdir()
    assert brings_code(["org/model"])
    assert brings_code([str(model)])  # nothing is known of it
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not brings_code([str(model)])
    assert brings_code([str(model), "org/tokenizer"])
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "a.B"}}))
    assert brings_code([str(model), str(tokenizer)])
