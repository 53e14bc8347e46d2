"""``adapter=lora`` from the command line to an export that transformers and peft read."""

import hashlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from components.adapters import lora_config
from components.contracts.errors import ConfigError
from components.models import ModelSpec
from components.models.generate import load_model
from components.models.pretrained import content_hash
from runner.commands.evaluate import evaluation
from runner.commands.export import export
from runner.training.watchdog import Watchdog
from tests.e2e.commands import EXPORTING, SMALL, call_here, curve, run_here

LORA = (*EXPORTING, "adapter=lora", "adapter.r=4", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(
        tmp_path_factory.mktemp("run"),
        *LORA,
        "stage=dpo",
        "checkpoint.save_every=2",
        "checkpoint.keep_last=0",
    )


def test_the_export_is_an_adapter_over_the_base(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(run / "base"))
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    ids = torch.arange(12)[None]
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, run / "export")(ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-3)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(run / "export")(ids).logits, adapted)
    export([f"adapter={run / 'export'}", "merge=true", f"output={tmp_path / 'merged'}"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_is_exported_as_by_the_run(run: Path, tmp_path: Path) -> None:
    export([f"checkpoint={run}", f"output={tmp_path / 'out'}"])
    names = sorted(path.name for path in (run / "export").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (run / "export" / name).read_bytes(), name
    merged, ours = tmp_path / "merged", tmp_path / "ours"
    export([f"adapter={run / 'export'}", "merge=true", f"output={merged}"])
    export([f"checkpoint={run}", "merge=true", f"output={ours}"])
    assert (ours / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="dtype: an adapter is kept in fp32"):
        export([f"checkpoint={run}", "dtype=bf16", f"output={tmp_path / 'other'}"])


def test_no_model_begins_with_an_adapter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_here(f"run.output_dir={tmp_path}", *SMALL, f"checkpoint.init_from={run}") == 2
    assert "adapter.path=RUN/export" in capsys.readouterr().err.replace("\n", " ")


def test_it_resumes_and_only_on_its_base(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = run / "checkpoints" / "step_00000002"
    rest = run_here(tmp_path / "rest", *LORA, "stage=dpo", f"checkpoint.resume={half}", "run.export=false")
    assert curve(rest) == curve(run)[2:]
    for change, words in (
        ("model.architecture.initializer_range=0.03", "the frozen weights are not those of its run"),
        ("adapter.alpha=16", "adapter, model.freeze, model.train_only: other parameters were trained"),
        ("adapter=none", "adapter, model.freeze, model.train_only: other parameters were trained"),
        (
            "run.seed=1 checkpoint.allow_mismatch=true",
            "checkpoint.init_from, model.path or run.seed has changed",
        ),
    ):
        options = [one for one in LORA if "none" not in change or not one.startswith("adapter")]
        code = call_here(
            f"run.output_dir={tmp_path}", *options, "stage=dpo", f"checkpoint.resume={half}", *change.split()
        )
        assert code == 2
        assert words in capsys.readouterr().err


def test_a_forecast_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model of the hub would be downloaded for a hash that nothing needs."""
    monkeypatch.setattr(ModelSpec, "content_hash", None)
    assert call_here(f"run.output_dir={tmp_path}", *LORA, "stage=dpo", "preflight.mode=only") == 0


def test_it_continues_as_another_run(run: Path, tmp_path: Path) -> None:
    model = ("model=hf", f"model.path={run / 'base'}", "run.device=cpu", "run.final_sample_tokens=0")
    stage = ("stage=dpo", "stage.reference=adapter_off")
    short = ("data.max_length=128", "run.max_steps=1", "optimizer.lr=0")
    source = shutil.copytree(run / "export", tmp_path / "source")
    more = run_here(tmp_path, *model, *stage, *short, "adapter=lora", f"adapter.path={source}")
    tensors = [load_file(path / "export" / "adapter_model.safetensors") for path in (run, more)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    config = json.loads((more / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "base")
    assert not (more / "base").exists()
    shutil.rmtree(source)  # its checkpoints have every trained value
    export([f"checkpoint={more}", f"output={tmp_path / 'out'}"])
    weights = "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (more / "export" / weights).read_bytes()


def test_the_content_of_a_folder_is_every_byte(run: Path, tmp_path: Path) -> None:
    file = run / "base" / "model.safetensors"
    stored = bytearray(file.read_bytes())
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(stored)
    assert content_hash(tmp_path) == content_hash(run / "base")
    blob = tmp_path / "blobs" / hashlib.sha256(stored).hexdigest()  # as in the cache of the Hugging Face hub
    blob.parent.mkdir()
    copy.rename(blob)
    copy.symlink_to(blob)
    assert content_hash(tmp_path) == content_hash(run / "base")
    copy.unlink()
    stored[-1] ^= 1
    copy.write_bytes(stored)
    assert content_hash(tmp_path) != content_hash(run / "base")


def test_the_only_trained_part_is_the_rest_of_a_frozen_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run with ``train_only`` is that with ``freeze`` to the last bit, and continues its checkpoints."""
    saved = (*SMALL, "checkpoint.save_every=2")
    frozen = run_here(tmp_path, *saved, "model.freeze=[model.layers.0.*, '*embed_tokens*']")
    only = "model.train_only=[model.layers.1.*, model.norm.*]"
    assert curve(run_here(tmp_path, *saved, only)) == curve(frozen)
    half = f"checkpoint.resume={frozen / 'checkpoints' / 'step_00000002'}"
    assert curve(run_here(tmp_path, *saved, only, half)) == curve(frozen)[2:]
    assert call_here(f"run.output_dir={tmp_path}", *saved, "model.train_only=[model.layers.1.*]", half) == 2
    assert "other parameters were trained" in capsys.readouterr().err


PISSA = ("adapter.init_lora_weights=pissa", "adapter.pissa_niter=2", "stage=dpo", "hook=ema")


def test_pissa_resumes_and_is_exported_as_an_ordinary_adapter(tmp_path: Path) -> None:
    """The export has twice the rank. Its merge is that of the checkpoint, and the average's is near it."""
    run = run_here(tmp_path / "run", *LORA, *PISSA, "checkpoint.save_every=2", "checkpoint.keep_last=0")
    half = f"checkpoint.resume={run / 'checkpoints' / 'step_00000002'}"
    rest = run_here(tmp_path / "rest", *LORA, *PISSA, half)
    assert curve(rest) == curve(run)[2:]
    export([f"checkpoint={run}", f"output={tmp_path / 'out'}"])
    file = "adapter_model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (run / "export" / file).read_bytes()
    assert (rest / "export" / file).read_bytes() == (run / "export" / file).read_bytes()
    export([f"checkpoint={run}", "merge=true", f"output={tmp_path / 'ours'}"])
    export([f"adapter={run / 'export'}", "merge=true", f"output={tmp_path / 'merged'}"])
    ids = torch.arange(12)[None]
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, run / "export")(ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-3)
    for folder in ("ours", "merged"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / folder)(ids).logits
        torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    average, last = (load_file(run / folder / file) for folder in ("ema", "export"))
    assert all(
        torch.equal(average[name].narrow(dim, 4, 4), last[name].narrow(dim, 4, 4))
        for name in last
        for dim in [int("lora_B" in name)]
    )


def test_a_slow_start_is_not_hung_and_a_resume_is_not_slow(tmp_path: Path) -> None:
    """The watchdog hears of each decomposition, and a run that resumes has none."""
    options = (*LORA, PISSA[0], "run.export=false", "run.max_steps=1", "run.final_sample_tokens=0")
    with (
        mock.patch.object(Watchdog, "beat", autospec=True, side_effect=Watchdog.beat) as beat,
        mock.patch.object(lora_config, "principal_factors", wraps=lora_config.principal_factors) as svd,
    ):
        run = run_here(tmp_path, *options)
        heard = [call for call in beat.call_args_list if call.args[1] == "building the engine"]
        assert len(heard) > svd.call_count == 14
        run_here(tmp_path, *options, f"checkpoint.resume={run}", "run.max_steps=2")
        assert svd.call_count == 14


QLORA = (*EXPORTING, "adapter=qlora", "adapter.r=4", "optimizer.lr=1e-2", "stage=dpo")


def test_a_base_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export, its merge and the checkpoint's are the trained function, as is peft on a base in 4 bits.

    A run resumes to the last bit, on two ranks with the same curve, and only in 4 bits.
    """
    run = run_here(tmp_path / "run", *QLORA, "checkpoint.save_every=2", "checkpoint.keep_last=0")
    stored = json.loads((run / "export" / "quantization_config.json").read_text())
    ids = torch.arange(12)[None]
    coarse = BitsAndBytesConfig(**stored, bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(run / "base", quantization_config=coarse, device_map="cpu")
    # In evaluation mode bitsandbytes rounds the scales to bf16 on CPUs with AVX512.
    expected = PeftModel.from_pretrained(base, run / "export").train()(ids).logits
    export([f"adapter={run / 'export'}", "merge=true", f"output={tmp_path / 'merged'}"])
    export([f"checkpoint={run}", "merge=true", f"output={tmp_path / 'ours'}"])
    bound = 1e-5 * float(expected.abs().max())
    for path in (run / "export", tmp_path / "merged", tmp_path / "ours"):
        torch.testing.assert_close(load_model(path, False)(ids).logits, expected, rtol=1e-5, atol=bound)
    finer = AutoModelForCausalLM.from_pretrained(run / "export")(ids).logits
    assert not torch.allclose(finer, expected, atol=100 * bound)

    assert "adapter=qlora" in evaluation([f"checkpoint={run / 'export'}", "data=demo"])

    half = f"checkpoint.resume={run / 'checkpoints' / 'step_00000002'}"
    rest = (*QLORA, half, "run.export=false")
    assert curve(run_here(tmp_path / "rest", *rest)) == curve(run)[2:]
    two = curve(run_here(tmp_path / "two", *rest, "parallelism=fsdp2"))
    for ours, theirs in zip(two, curve(run)[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert call_here(f"run.output_dir={tmp_path}", *rest, "adapter.quantize=null") == 2
    assert "other parameters were trained" in capsys.readouterr().err
