"""Adapters on FSDP2 on one rank, against plain peft and torch.

Other layouts are tested in test_fsdp2_layouts.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.adapters.merge import merge_adapter
from components.checkpoint.dcp import save_tensors, saved_keys
from components.contracts.errors import ConfigError
from components.models import export_folder
from tests.distributed import adapter_cases as cases
from tests.distributed.adapter_cases import KINDS, Plain, assert_equal, continued
from tests.distributed.cases import (
    assert_same,
    fsdp2,
    make_engine,
    next_token,
    plain_model,
    plain_step,
    share,
    spec,
    step,
)
from tests.distributed.engine_cases import identical, snapshot
from tests.distributed.gradients import capture

CASES = [
    ("qwen3", "attention", "packed"),
    ("qwen3", "mlp", "padded"),
    ("phi3", "all", "packed"),
    ("llama", "all", "padded"),
    ("qwen3", "dora", "packed"),
    ("llama", "saved", "padded"),
    ("biased", "dora", "padded"),
    ("biased", "nf4", "packed"),
    ("llama", "nf4 saved", "padded"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(("family", "kind", "layout"), CASES)
def test_steps_equal_plain_peft(plain: Plain, family: str, kind: str, layout: str) -> None:
    folder, expected = plain(family, kind)
    found = cases.engine_steps(fsdp2(), family, layout, folder, kind)
    assert_equal(found, expected)
    torch.testing.assert_close(torch.cat(found.reference), torch.cat(expected.reference))


PROMPT = torch.arange(30, 50)
"""Token ids without special tokens, because ``generate`` does not attend to padding."""


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=PROMPT[None], use_cache=False).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the untied model of the cases to a folder."""
    path, description = tmp_path_factory.mktemp("base"), spec("llama")
    weights = description.weights(0)
    names = dict(plain_model("llama").named_parameters())
    export_folder(description, ((name, weights(name)) for name in names), path, torch.float32)
    description.add_tokenizer(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_bitwise_what_was_read_and_merges(
    plain: Plain, base: Path, tmp_path: Path, kind: str
) -> None:
    """In peft, the exported and the original folder have the same logits, and so does the merged model."""
    source, _ = plain("llama", kind)
    engine = make_engine("llama", adapter=continued(source, dora=kind == "dora"))
    engine.export(tmp_path / "export")
    engine.close()
    files = (path / "adapter_model.safetensors" for path in (tmp_path / "export", source))
    assert identical(*map(load_file, files))
    expected = logits(PeftModel.from_pretrained(plain_model("llama"), source))
    assert torch.equal(logits(PeftModel.from_pretrained(plain_model("llama"), tmp_path / "export")), expected)
    config = tmp_path / "export" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}))
    answer = spec("llama").generate(tmp_path / "export", PROMPT.tolist(), 12)
    theirs = PeftModel.from_pretrained(plain_model("llama"), source).eval()
    greedy = theirs.generate(PROMPT[None], max_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    assert answer == greedy.tolist()
    merged = merge_adapter(str(tmp_path / "export"), str(tmp_path / "merged"), base=str(base))
    found = logits(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(logits(plain_model("llama")), expected, atol=1e-2)
    with pytest.raises(ConfigError, match=r"output=.*is not an empty folder"):
        merge_adapter(str(source), str(merged), base=str(base))
    with pytest.raises(ConfigError, match="names no model"):
        merge_adapter(str(source), str(tmp_path / "other"))


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 40, "target_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "c_attn"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.0.mlp.up_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": r".*\.1\..*(q_proj|down_proj)"},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["rank", "no match", "excluded", "layer", "pattern", "every norm"],
)
def test_whatever_peft_selects_is_merged(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = get_peft_model(plain_model("llama"), LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in cases.trained(model).values():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "merged"), base=str(base))
    found = logits(AutoModelForCausalLM.from_pretrained(merged))
    expected = logits(PeftModel.from_pretrained(plain_model("llama"), tmp_path / "adapter"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_checkpoint_holds_the_adapter_alone(plain: Plain, tmp_path: Path) -> None:
    """It holds the adapter's weights and moments; the next step on the frozen model is bitwise the same."""
    one, _ = plain("llama", "all")
    engine = make_engine("llama", adapter=continued(one))
    batches = share(engine, "packed", 2)
    step(engine, batches, next_token())
    save_tensors(tmp_path, engine.tensors())
    names = set(load_file(one / "adapter_model.safetensors"))
    names = {name.removeprefix("base_model.model.") for name in names}
    expected = {f"{part}/{name}" for part in ("model", "exp_avg", "exp_avg_sq") for name in names}
    assert {key for key in saved_keys(tmp_path) if "/" in key and not key.startswith("rng")} == expected
    trained = sum(parameter.numel() for parameter in engine.weights.values())
    kept = sum(
        v.numel() for state in engine.optimizer.optimizer.state.values() for v in state.values() if v.ndim
    )
    assert kept == 2 * trained
    described = engine.describe()
    assert described["trained_parameters"] == trained
    assert described["parameters"] == trained + sum(p.numel() for p in plain_model("llama").parameters())
    step(engine, batches, next_token())
    after = snapshot(engine)
    engine.close()
    other = make_engine("llama", adapter=replace(continued(one), path=None, init_lora_weights="kaiming"))
    other.load(tmp_path)
    step(other, batches, next_token())
    assert identical(snapshot(other), after)
    other.close()


def test_dropout_is_of_training_alone(plain: Plain) -> None:
    folder, _ = plain("qwen3", "attention")
    still, dropping = (continued(folder, dropout=p) for p in (0.0, 0.5))
    results = []
    for adapter in (still, dropping):
        engine = make_engine("qwen3", adapter=adapter, reference="adapter_off")
        batches, loss = share(engine, "packed", 4), next_token()
        evaluated = engine.evaluate([batches], loss)["loss"]
        reference = torch.cat([r.flatten() for r in engine.logps(batches, reference=True)])
        later = [replace(b, sequence_keys=1 + b.sequence_keys) for b in batches]  # those of another step
        trained = [step(engine, given, loss, lr=0.0).loss for given in (batches, later)]
        results.append((evaluated, reference, trained))
        engine.close()
    (evaluated, reference, trained), (evaluated_too, reference_too, dropped) = results
    assert trained[0] == trained[1] == pytest.approx(evaluated, rel=1e-6)
    assert evaluated_too == evaluated
    assert torch.equal(reference_too, reference)
    assert dropped[0] != dropped[1]
    assert dropped[0] != trained[0]
    engine = make_engine("dropping", adapter=still, reference="adapter_off")
    batches = share(engine, "packed", 4)
    one, two, *trained = (
        engine.logps(batches, reference=reference)[0] for reference in (True, True, False, False)
    )
    assert torch.equal(one, two)
    assert not torch.equal(*trained)  # the policy keeps the dropout of the model
    engine.close()


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_bf16_keeps_what_is_frozen_in_bf16(plain: Plain, recompute: Any) -> None:
    folder, expected = plain("qwen3", "attention")
    on = fsdp2(activation_checkpointing=recompute)
    engine = make_engine("qwen3", on=on, adapter=continued(folder), dtype=torch.bfloat16)
    kinds = {(parameter.requires_grad, parameter.dtype) for _, parameter in engine.named_weights}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    grads = capture(engine)
    result = step(engine, share(engine, "packed", 2), next_token())
    assert result.loss == pytest.approx(expected.first.loss, rel=1e-2)
    for name, gradient in expected.first.grads.items():
        assert (grads[name] - gradient).norm() < 0.1 * gradient.norm(), name
    engine.close()


@pytest.mark.parametrize("patterns", [("model.embed_tokens.*", "*.layers.0.*"), ("*mlp*", "lm_head.weight")])
def test_a_frozen_part_stays_and_the_rest_is_trained(patterns: tuple[str, ...], tmp_path: Path) -> None:
    engine = make_engine("llama", freeze=patterns)
    before = {name: parameter.detach().clone() for name, parameter in engine.named_weights}
    grads = capture(engine)
    result = step(engine, share(engine, "packed", 2), next_token())
    expected = plain_step("llama", "token")
    kept = {name: gradient for name, gradient in expected.grads.items() if name in engine.weights}
    norm = torch.stack([gradient.norm() for gradient in kept.values()]).norm().item()
    assert 0 < len(kept) < len(expected.grads)
    assert_same(
        replace(expected, grads=grads, loss=result.loss, grad_norm=result.grad_norm),
        replace(expected, grads=kept, grad_norm=norm),
    )
    for name, parameter in engine.named_weights:
        assert torch.equal(parameter, before[name]) is (name not in kept), name
    save_tensors(tmp_path / "checkpoint", engine.tensors())
    saved = {key for key in saved_keys(tmp_path / "checkpoint") if key.startswith("model/")}
    assert saved == {f"model/{name}" for name in kept}
    engine.export(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == expected.grads.keys()
    engine.close()
