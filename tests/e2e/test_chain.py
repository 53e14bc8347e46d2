"""pt -> sft -> dpo with ``checkpoint.init_from``, and exports of their checkpoints with ``runner.export``."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.contracts.errors import ConfigError
from runner.commands.export import export
from tests.e2e.commands import EXPORTING, SMALL, call_here, curve, rows, run_here

FILES = {"sft": "2_sft", "dpo": "3_dpo"}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run the three experiments of conf/experiment/pretrain_sft_dpo; the first one saves only its weights."""
    folder = tmp_path_factory.mktemp("chain")
    runs = {
        "pt": run_here(folder, "experiment=pretrain_sft_dpo/1_pt", *EXPORTING, "checkpoint.model_only=true")
    }
    runs["sft"] = run_here(folder, "experiment=pretrain_sft_dpo/2_sft", *EXPORTING)
    runs["dpo"] = run_here(folder, "experiment=pretrain_sft_dpo/3_dpo", *EXPORTING, "checkpoint.save_every=2")
    return runs


@pytest.mark.parametrize(("before", "after"), [("pt", "sft"), ("sft", "dpo")])
def test_a_stage_begins_with_the_weights_of_the_one_before(
    chain: dict[str, Path], tmp_path: Path, before: str, after: str
) -> None:
    """The run is bitwise the one that starts from the export: policy and reference are read, nothing else."""
    small = [option for option in SMALL if not option.startswith("model.")]
    export_of = ("model=hf", f"model.path={chain[before] / 'export'}")
    other = run_here(
        tmp_path,
        f"experiment=pretrain_sft_dpo/{FILES[after]}",
        *export_of,
        *small,
        "checkpoint.init_from=null",
    )
    assert curve(other) == curve(chain[after])
    point = chain[before] / "checkpoints" / "step_00000004"
    assert yaml.safe_load((chain[after] / "config.yaml").read_text())["checkpoint"]["init_from"] == str(point)


def test_a_resumed_run_has_the_reference_that_it_began_with(
    chain: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = chain["dpo"] / "checkpoints" / "step_00000002"
    same = (
        f"run.output_dir={tmp_path}",
        "stage=dpo",
        "optimizer.lr=1e-4",
        *SMALL,
        f"checkpoint.resume={half}",
    )
    assert call_here(*same) == 2
    assert "the reference model was checkpoint.init_from=" in capsys.readouterr().err.replace("\n", " ")
    assert call_here(*same, f"checkpoint.init_from={chain['pt']}") == 2
    assert "checkpoint.init_from" in capsys.readouterr().err
    rest = run_here(tmp_path / "rest", *same[1:], f"checkpoint.init_from={chain['sft']}")
    assert curve(rest) == curve(chain["dpo"])[2:]


def test_weights_that_would_not_be_read_are_refused(
    chain: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = (f"run.output_dir={tmp_path}", *SMALL, "run.max_steps=6", f"checkpoint.resume={chain['sft']}")
    assert call_here(*longer, "optimizer.lr=1e-3", f"checkpoint.init_from={chain['dpo']}") == 2
    assert "leave checkpoint.init_from out" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("checkpoint.init_from={tmp}",), ["checkpoint.init_from: ", "holds no complete checkpoint"]),
        (("checkpoint.init_from={pt}", "model.architecture.hidden_size=32"), ["model needs [8192, 32]"]),
        (("checkpoint.init_from={pt}", "model.architecture.num_hidden_layers=3"), ["lacks model.layers.2"]),
    ],
)
def test_other_checkpoints_are_refused(
    chain: dict[str, Path],
    tmp_path: Path,
    options: tuple[str, ...],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [option.format(tmp=tmp_path, pt=chain["pt"]) for option in options]
    assert call_here(f"run.output_dir={tmp_path}/out", *SMALL, *filled) == 2
    message = capsys.readouterr().err.replace("\n", " ")
    assert all(word in message for word in words), message


def test_a_damaged_checkpoint_begins_nothing(
    chain: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = tmp_path / "checkpoints" / "step_00000004"
    shutil.copytree(chain["sft"] / "checkpoints" / "step_00000004", point)
    (file,) = point.glob("*.distcp")
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    begin = (
        f"run.output_dir={tmp_path}/out",
        *SMALL,
        f"checkpoint.init_from={point}",
        "checkpoint.verify=true",
    )
    assert call_here(*begin) == 2
    assert "checkpoint.init_from: " in (message := capsys.readouterr().err)
    assert file.name in message
    file.write_bytes(stored[:-1])
    with pytest.raises(ConfigError, match=file.name):
        export([f"checkpoint={point}", f"output={tmp_path / 'o'}"])


@pytest.mark.parametrize("stage", ["pt", "dpo"])
def test_an_export_is_that_of_the_run(chain: dict[str, Path], tmp_path: Path, stage: str) -> None:
    export([f"checkpoint={chain[stage]}", f"output={tmp_path / 'out'}"])
    assert_same_files(tmp_path / "out", chain[stage] / "export")


def assert_same_files(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    assert [name for name in names if (found / name).read_bytes() != (expected / name).read_bytes()] == []


def test_an_export_of_an_earlier_step_in_another_dtype(chain: dict[str, Path], tmp_path: Path) -> None:
    point = chain["dpo"] / "checkpoints" / "step_00000002"
    export([f"checkpoint={point}", f"output={tmp_path / 'out'}", "dtype=bf16"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    last = AutoModelForCausalLM.from_pretrained(chain["dpo"] / "export")
    assert model.dtype == torch.bfloat16
    assert not torch.equal(model.lm_head.weight, last.lm_head.weight.bfloat16())


def test_a_part_of_a_model_is_completed_with_what_was_frozen(chain: dict[str, Path], tmp_path: Path) -> None:
    frozen = ("model.freeze=[model.embed_tokens.*]", f"checkpoint.init_from={chain['pt']}", "run.max_steps=2")
    run = run_here(tmp_path, *EXPORTING, *frozen)
    export([f"checkpoint={run}", f"output={tmp_path / 'out'}"])
    assert_same_files(tmp_path / "out", run / "export")
    assert len(rows(run, "train/loss")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["output={tmp}/o"], "checkpoint, adapter: is missing"),
        (["checkpoint={pt}", "adapter=x", "output={tmp}/o"], "checkpoint, adapter: both are given"),
        (["checkpoint={tmp}", "output={tmp}/o"], "checkpoint: "),
        (["checkpoint={pt}"], "output: is missing"),
        (["checkpoint={pt}", "output={pt}"], "output="),
        (["checkpoint={pt}", "output={tmp}/o", "merge=true"], "merge: the checkpoint is of a whole model"),
        (["checkpoint={pt}", "output={tmp}/o", "base=x"], "base: is not read"),
        (["checkpoint={pt}", "output={tmp}/o", "mtp=false"], "mtp: the run has no layers"),
        (["adapter=x", "merge=true", "output={tmp}/o", "mtp=false"], "mtp: is not read with adapter"),
        (["checkpoint={pt}", "output={tmp}/o", "dtype=fp8"], "dtype=fp8: must be fp32 or bf16 or fp16"),
    ],
)
def test_mistakes_in_an_export(
    chain: dict[str, Path], tmp_path: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        export([argument.format(tmp=tmp_path, pt=chain["pt"]) for argument in arguments])
    assert str(caught.value).startswith(words)


def test_routers_biases_go_along(tmp_path: Path) -> None:
    """Router biases, which have no gradients, are saved, and exported in fp32.

    An export with mtp=false and dpo drop the MTP layers.
    """
    deepseek = (
        "model=deepseek_tiny",
        *(option for option in EXPORTING if "head" not in option),
        "run.dtype=bf16",
        "model.moe.bias_update_rate=0.001",
    )
    run = run_here(tmp_path, *deepseek, "model.mtp.num_layers=1", "run.name=first")
    checkpoint = run / "checkpoints" / "step_00000004"
    export([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", "dtype=bf16"])
    assert_same_files(tmp_path / "out", run / "export")
    stored = load_file(run / "export" / "model.safetensors")
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert bias.abs().max() > 0
    export([f"checkpoint={run}", f"output={tmp_path / 'plain'}", "mtp=false"])
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    mtp = f"model.layers.{config['num_hidden_layers']}."
    kept = load_file(tmp_path / "plain" / "model.safetensors")
    assert kept.keys() == {name for name in stored if not name.startswith(mtp)} < stored.keys()
    assert all(torch.equal(kept[name], stored[name]) for name in kept)
    after = run_here(tmp_path, *deepseek, "stage=dpo", f"checkpoint.init_from={run}", "run.max_steps=1")
    assert rows(after, "train/loss")[0]["train/lm_loss"] == pytest.approx(math.log(2), rel=1e-3)


def test_an_export_without_mtp_of_a_run_that_trained_a_part(tmp_path: Path) -> None:
    """Nothing but the number of its layer tells a trained weight of MTP from those of other layers."""
    parts = "model.train_only=[model.layers.1.self_attn.*,model.layers.2.self_attn.*]"
    run = run_here(tmp_path, *EXPORTING, "run.max_steps=1", "model.mtp.num_layers=1", parts)
    export([f"checkpoint={run}", f"output={tmp_path / 'plain'}", "mtp=false"])
    stored, kept = (
        load_file(folder / "model.safetensors") for folder in (run / "export", tmp_path / "plain")
    )
    assert kept.keys() == {name for name in stored if not name.startswith("model.layers.2.")} < stored.keys()
    assert all(torch.equal(kept[name], stored[name]) for name in kept)
