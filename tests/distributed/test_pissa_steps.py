"""PiSSA on both engines, against peft's own model, whose base is the residual of every matrix.

Other layouts are columns of the parity table.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from components.adapters import LoRA, lora_config
from components.checkpoint.dcp import save_tensors
from components.checkpoint.reader import StoredTensors
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.losses import DPO
from tests.distributed.adapter_cases import label_logps
from tests.distributed.cases import fsdp2, make_engine, megatron, next_token, plain_model
from tests.distributed.engine_cases import identical
from tests.distributed.megatron_lora_cases import Run, plain_run, plain_sft, plain_sums, run_on, sums
from tests.distributed.test_megatron_lora import assert_same

ENGINES = pytest.mark.parametrize("on", [fsdp2(), megatron(dp=1)], ids=["fsdp2", "megatron"])
STEPS = 4


class Peft:
    """peft's model trained for ``STEPS`` steps, and its conversion to an ordinary adapter."""

    def __init__(self, family: str, folder: Path, **settings: Any) -> None:
        config = LoraConfig(init_lora_weights="pissa", task_type="CAUSAL_LM", **settings)
        self.model: Any = get_peft_model(plain_model(family), config)  # type: ignore[arg-type]
        self.model.peft_config["default"].init_lora_weights = True  # else the second load subtracts again
        self.model.save_pretrained(folder / "initial")
        self.model.peft_config["default"].init_lora_weights = "pissa"
        self.run: Run = plain_run(self.model, "sft", STEPS)
        self.trained = {
            name.removeprefix("base_model.model.").replace(".default", ""): p.detach().clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        initial = str(folder / "initial")
        self.model.save_pretrained(folder / "converted", path_initial_model_for_weight_conversion=initial)


SOME = {"r": 4, "target_modules": ("q_proj", "v_proj", "up_proj", "down_proj")}
SAVED = {"r": 3, "target_modules": ("q_proj", "down_proj"), "modules_to_save": ("lm_head",)}


@pytest.mark.parametrize(
    ("on", "family", "settings", "rslora"),
    [
        (fsdp2(), "llama", {"r": 3, "target_modules": "all-linear"}, False),
        (megatron(dp=1), "llama", {"r": 3, "target_modules": "all-linear"}, False),
        (fsdp2(), "biased", SOME, True),
        (megatron(dp=1), "biased", SOME, True),
        (fsdp2(), "llama", SAVED, False),
    ],
)
def test_steps_and_export_are_those_of_peft(
    on: FSDP2 | Megatron, family: str, settings: dict[str, Any], rslora: bool, tmp_path: Path
) -> None:
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    theirs = Peft(family, tmp_path, lora_alpha=4, use_rslora=rslora, **lists)
    adapter = LoRA(alpha=4.0, rslora=rslora, init_lora_weights="pissa", **settings)
    engine = make_engine(family, on=on, adapter=adapter)
    run = run_on(engine, next_token(), STEPS)
    ours = torch.stack(sums(engine, reference=False)).float()
    engine.export(tmp_path / "export")
    engine.close()
    assert_same(run, theirs.run)
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("export", "converted")
    )
    # The conversion leaves out modules that are trained whole.
    assert {name for name in found if ".lora_" in name} == expected.keys()
    rank = settings["r"]
    for name, value in expected.items():
        dim = 0 if "lora_A" in name else 1
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        kept = theirs.trained[name.removeprefix("base_model.model.")]
        torch.testing.assert_close(found[name].narrow(dim, 0, rank), kept, rtol=1e-4, atol=1e-5)
    configs = [
        json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("export", "converted")
    ]
    for key in ("r", "lora_alpha", "use_rslora", "init_lora_weights"):
        assert configs[0][key] == configs[1][key]
    loaded = PeftModel.from_pretrained(plain_model(family), tmp_path / "export").eval()
    with torch.no_grad():
        for model in (loaded, theirs.model):
            torch.testing.assert_close(ours, torch.stack(plain_sums(model, 0)), rtol=1e-5, atol=1e-5)


@ENGINES
def test_the_reference_is_the_original_model(on: FSDP2 | Megatron) -> None:
    """It stays so after steps of DPO, which begin with the loss of equal models."""
    adapter = LoRA(r=3, alpha=4.0, init_lora_weights="pissa")
    engine = make_engine("llama", on=on, adapter=adapter, reference="adapter_off")
    run = run_on(engine, DPO(beta=0.5, label_smoothing=0.0), 2)
    reference, trained = (torch.stack(sums(engine, reference=which)).float() for which in (True, False))
    engine.close()
    with torch.no_grad():
        expected = torch.stack([logps.sum() for logps in label_logps(plain_model("llama"))])
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    assert run.curve[0][0] == pytest.approx(0.693147, rel=1e-5)
    assert not torch.allclose(trained, reference, rtol=1e-3)


@ENGINES
def test_bf16_begins_with_the_original_model(on: FSDP2 | Megatron, tmp_path: Path) -> None:
    """The initial factors are in fp32, so that the export of the first step adds nothing."""
    adapter = LoRA(r=3, alpha=4.0, init_lora_weights="pissa")
    engine = make_engine("llama", on=on, adapter=adapter, dtype=torch.bfloat16)
    run_on(engine, next_token(), 1, lr=0.0)
    engine.export(tmp_path / "export")
    engine.close()
    model = PeftModel.from_pretrained(plain_model("llama"), tmp_path / "export").eval()
    with torch.no_grad():
        adapted, original = (torch.stack(plain_sums(m, 0)) for m in (model, plain_model("llama")))
    torch.testing.assert_close(adapted, original, rtol=1e-6, atol=1e-6)


@ENGINES
def test_a_checkpoint_holds_the_initial_factors(on: FSDP2 | Megatron, tmp_path: Path) -> None:
    """Both engines continue with the stored ones, although their own are those of another decomposition."""
    adapter = LoRA(r=3, alpha=4.0, init_lora_weights="pissa", pissa_niter=0)
    engine = make_engine("llama", on=on, adapter=adapter)
    run_on(engine, next_token(), 2)
    save_tensors(tmp_path / "written", engine.tensors())
    expected = run_on(engine, next_token(), 2).curve
    engine.close()
    for other in (fsdp2(), megatron(dp=1)):
        engine = make_engine("llama", on=other, adapter=replace(adapter, pissa_niter=None))
        folder = tmp_path / type(other).__name__
        save_tensors(folder / "before", engine.tensors())
        engine.load(tmp_path / "written")
        save_tensors(folder / "after", engine.tensors(model_only=True))
        found = run_on(engine, next_token(), 2).curve
        engine.close()
        assert identical(weights(folder / "after"), weights(tmp_path / "written"))
        assert not identical(weights(folder / "before"), weights(tmp_path / "written"))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)


@ENGINES
def test_a_start_makes_progress_and_a_resume_decomposes_nothing(
    on: FSDP2 | Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, events = LoRA(r=3, init_lora_weights="pissa"), []
    factors = lora_config.principal_factors
    monkeypatch.setattr(lora_config, "principal_factors", lambda *x: events.append("svd") or factors(*x))
    make_engine("llama", on=on, adapter=adapter, progress=lambda: events.append("beat")).close()
    assert events.count("svd") == 14
    assert ("svd", "svd") not in pairwise(events)
    events.clear()
    make_engine("llama", on=on, adapter=adapter, restores=True).close()
    assert events == []


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = StoredTensors(checkpoint)
    return {name: tensors.read(f"model/{name}") for name in tensors.shapes("model") if ".initial." in name}


@ENGINES
def test_dropout_is_of_the_trained_factors_alone(on: FSDP2 | Megatron) -> None:
    """If it drops every input of the trained factors, the residual of peft's model is left."""
    adapter = LoRA(r=3, alpha=4.0, init_lora_weights="pissa", dropout=1 - 1e-9)
    engine = make_engine("llama", on=on, adapter=adapter)
    found = run_on(engine, next_token(), 1, lr=0.0).curve[0][0]
    engine.close()
    config = LoraConfig(
        r=3, lora_alpha=4, target_modules="all-linear", init_lora_weights="pissa", task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(plain_model("llama"), config)  # type: ignore[arg-type]
    with torch.no_grad(), model.disable_adapter():
        assert found == pytest.approx(plain_sft(model, 0).item(), rel=1e-5)
