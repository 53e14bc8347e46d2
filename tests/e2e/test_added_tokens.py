"""``model.add_tokens``: the same curve on every layout, and an export that has the tokens."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.commands import EXPORTING, SMALL, call_here, rows, run_here

TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
BASE = 8192
"""Size of the vocabulary of the embedded tokenizer, which lacks the tokens."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model: the export of a run."""
    return run_here(tmp_path_factory.mktemp("base"), *EXPORTING, "stage=pt", "run.max_steps=1") / "export"


def trained(folder: Path, base: Path, layout: str, *more: str) -> Path:
    small = [word for word in EXPORTING if not word.startswith("model.")]
    model = ("model=hf", f"model.path={base}", "model.chat_template=llama3", "model.add_tokens=true")
    return run_here(folder, *small, *model, f"parallelism={layout}", "run.eval_every=0", *more)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return trained(tmp_path_factory.mktemp("single"), base, "single")


def test_the_export_has_the_tokens_and_their_trained_rows(tmp_path: Path, base: Path, single: Path) -> None:
    model, words = (kind.from_pretrained(single / "export") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = words.convert_tokens_to_ids(list(TOKENS))
    assert ids == [BASE, BASE + 1, BASE + 2]
    assert model.config.vocab_size == len(words) == BASE + 3
    assert ids[2] in model.generation_config.eos_token_id  # a completion ends with the turn
    rows_before = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    assert len(rows_before) == BASE
    added = model.get_input_embeddings().weight[BASE:]
    assert not torch.equal(added[0], added[1])  # both began as the mean
    chat = [{"role": "user", "content": "What is os?"}]
    assert ids[0] in words.apply_chat_template(chat, return_dict=False)
    again = ["model=hf", f"model.path={single}/export", "run.evaluate_only=true", "run.export=false"]
    small = [word for word in SMALL if not word.startswith("model.")]
    assert call_here(*small, *again, f"run.output_dir={tmp_path}", "run.name=again") == 0
    (row,) = rows(next((tmp_path / "again").iterdir()), "eval/loss")
    assert row["eval/loss"] == pytest.approx(rows(single, "eval/loss")[-1]["eval/loss"], rel=1e-6)


@pytest.mark.parametrize("layout", ["fsdp2_tp2", "tp2pp2"])
def test_every_layout_has_one_curve(tmp_path: Path, base: Path, single: Path, layout: str) -> None:
    run = trained(tmp_path, base, layout, "run.export=false")
    expected = [row["train/loss"] for row in rows(single, "train/loss")]
    assert [row["train/loss"] for row in rows(run, "train/loss")] == pytest.approx(expected, rel=1e-5)


def test_an_adapter_trains_the_rows_with_the_modules_that_hold_them(tmp_path: Path) -> None:
    """Its folder names a base model with the new rows, on which peft and this program load it."""
    untied = ("model.architecture.tie_word_embeddings=false", "run.max_steps=1")
    base = run_here(tmp_path / "base", *EXPORTING, "stage=pt", *untied) / "export"
    saved = ("adapter=lora", "adapter.modules_to_save=[embed_tokens,lm_head]", "optimizer.lr=1e-2")
    run = trained(tmp_path / "run", base, "single", *saved)
    settings = json.loads((run / "export" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(run / "base")
    grown = AutoModelForCausalLM.from_pretrained(run / "base")
    initial = grown.get_input_embeddings().weight.detach().clone()
    assert torch.equal(initial[BASE], initial[BASE + 2]), "both begin as the mean"
    model = PeftModel.from_pretrained(grown, run / "export").merge_and_unload()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert len(module.weight) == BASE + 3
        assert not torch.equal(module.weight[BASE], module.weight[BASE + 2])
    words = AutoTokenizer.from_pretrained(run / "export")
    assert words.convert_tokens_to_ids(list(TOKENS)) == [BASE, BASE + 1, BASE + 2]
    small = [word for word in SMALL if not word.startswith("model.")]
    again = ["model=hf", f"model.path={run}/base", "adapter=lora", f"adapter.path={run}/export"]
    again += ["run.evaluate_only=true", "run.export=false", "run.name=again", f"run.output_dir={tmp_path}"]
    assert call_here(*small, *again) == 0
    (row,) = rows(next((tmp_path / "again").iterdir()), "eval/loss")
    assert row["eval/loss"] == pytest.approx(rows(run, "eval/loss")[-1]["eval/loss"], rel=1e-6)
