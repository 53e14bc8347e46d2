import json
from pathlib import Path

from components.models.remote_code import brings_code


def test_only_a_folder_is_known_to_bring_no_code(tmp_path: Path) -> None:
    assert brings_code(None)
    assert brings_code("org/model")
    assert brings_code(str(tmp_path))  # nothing is known of it
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not brings_code(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "a.B"}}))
    assert brings_code(str(tmp_path))
