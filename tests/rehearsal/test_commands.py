"""``preflight.mode=rehearse`` as a user types it: a process of its own, tables, files and refusals."""

import json
from pathlib import Path
from unittest import mock

import pytest
from transformers import Qwen3Config

from components.contracts.errors import ConfigError
from components.rehearsal.device_guard import build_guard
from tests.e2e.commands import SMALL, call_here
from tests.rehearsal.rehearsed import rehearsed, run_forked_rehearsal

LITTLE = [word for word in SMALL if not word.startswith("run.device")]


def test_a_rehearsal_in_its_own_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank of the last pipeline stage runs on fake CUDA tensors, and everything it did is told."""
    chosen = ["stage=dpo", "parallelism=tp2pp2", "run.dtype=bf16", "preflight.mode=rehearse"]
    assert call_here(*LITTLE, *chosen, f"run.output_dir={tmp_path}") == 0
    (folder,) = (tmp_path / "preflight").iterdir()
    told = json.loads((folder / "preflight.json").read_text())
    assert told["rehearsal"]["stage"] == 1
    assert told["rehearsal"]["rank"] == 2
    assert told["rehearsal"]["fits"] is True
    assert {"reference", "forward", "backward", "update", "save"} <= {row["moment"] for row in told["peaks"]}
    assert {"tp", "pp"} <= {row["group"] for row in told["traffic"]}
    output = capfd.readouterr().err
    assert "preflight.device_name is not given, and H100 is assumed" in output
    for words in ("Not rehearsed", "Traffic", "Memory components"):
        assert words in output


BYTES = {
    "fsdp2": {"weights": 4 / 2, "moments": 8 / 2},
    "megatron": {"weights": 2, "masters": 4 / 2, "moments": 8 / 2},
}
"""Bytes per parameter of a rank of two in bf16, of components whose size does not depend on the moment."""


@pytest.mark.parametrize("engine", BYTES)
def test_the_components_of_the_memory_at_the_peak(engine: str, tmp_path: Path) -> None:
    """They add up to the peak, and each is that of the estimate within 2 % of the peak."""
    sharded = ["parallelism.distributed_optimizer=true"] * (engine == "megatron")
    chosen = [f"parallelism={engine}", "parallelism.dp=2", "run.dtype=bf16", *sharded]
    found = rehearsed(tmp_path, "model=tiny", "data.max_length=128", *chosen)
    rows = found.sections["memory_components"]
    sizes = {row["component"]: row["bytes"] for row in rows}
    assert sum(sizes.values()) == found.peak
    assert sum(row["estimated_bytes"] for row in rows) == found.estimate
    for row in rows:
        assert row["bytes"] == pytest.approx(row["estimated_bytes"], abs=0.02 * found.peak), row["component"]
    parameters = found.sections["parameters"]["total"]
    for name, each in BYTES[engine].items():
        assert sizes[name] == pytest.approx(each * parameters, rel=0.01), name
    assert ("gathered" in sizes) is (engine == "fsdp2")


@pytest.mark.parametrize("parallelism", ["fsdp2", "tp2"])
def test_a_folder_that_has_only_a_config(parallelism: str, tmp_path: Path) -> None:
    """The shapes of weights are enough; ``model.init`` is ``pretrained``, as by default."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192}
    Qwen3Config(**shape, **heads).save_pretrained(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    words = ["model=hf", f"model.path={tmp_path / 'model'}", f"parallelism={parallelism}", "run.dtype=bf16"]
    found = rehearsed(tmp_path / "runs", *words, "preflight.steps=1", "data.max_length=128")
    assert found.record["violations"] == []
    matrices = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 96
    assert found.sections["parameters"]["total"] == 2 * 8192 * 64 + 3 * (matrices + 2 * 64 + 2 * 16) + 64


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preflight.rank=4", "parallelism=tp2pp2"], "preflight.rank"),
        (["preflight.rank=-1"], "preflight.rank"),
        (["run.device=cpu"], "run.device: is cpu"),
        (["run.max_steps=1"], "preflight.steps: is 2, but the run has 1"),
        (["preflight.device_memory=1MiB"], "preflight.device_memory"),
    ],
)
def test_refusals(
    overrides: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = [*LITTLE, "preflight.mode=rehearse", f"run.output_dir={tmp_path}", *overrides]
    with mock.patch("runner.launch.rehearse.run_rehearsal", run_forked_rehearsal):
        assert call_here(*chosen) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "false"])
def test_a_machine_without_a_compiler(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "" if not compiler else "/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"(CXX|preflight.mode=rehearse).*(install|name another)"):
        build_guard(tmp_path)
    assert not any(tmp_path.glob("*.so"))
