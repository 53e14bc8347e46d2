"""``runner.evaluate``, ``runner.generate`` and ``runner.chat`` on checkpoints, exports and adapters."""

import io
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.checkpoint.to_hf import CheckpointModel
from components.contracts.errors import ConfigError, TrainingError
from components.data.records.options import RecordOptions
from components.data.tokenize.prompts import Prompt, read_prompts
from components.data.tokenizer import PATH
from components.models.generate import amend, load_model
from runner.cli import run_or_answer
from runner.commands.chat import chat
from runner.commands.evaluate import evaluation
from runner.commands.generate import write_completions
from runner.commands.trained_model import open_model, read_checkpoint, record_options
from tests.e2e.commands import EXPORTING, SMALL, call_here, newest, rows, run_here, write_chats

GUIDE = Path(__file__).parents[2] / "docs" / "after_training.md"
COMMANDS = [line for line in GUIDE.read_text().splitlines() if line.startswith("python -m runner.")]
PROMPTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Count to 3."}], "id": 7},
    {"prompt": "Count to seventeen, and then on to twenty."},
    {"prompt": "one"},
]
ANSWER = {"role": "assistant", "content": "1"}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(path)
    return path


def trained(tmp_path_factory: pytest.TempPathFactory, chats: Path, *more: str) -> Path:
    return trained_on(tmp_path_factory.mktemp("runs"), chats, *more)


def trained_on(folder: Path, chats: Path, *more: str) -> Path:
    data = ("data=files", f"data.train={chats}", "data.eval_fraction=0.2")
    varied = "model.architecture.initializer_range=0.3"  # so that different prompts get different answers
    return run_here(folder, *EXPORTING, *data, varied, "run.final_sample_tokens=0", *more)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    return trained(tmp_path_factory, chats)


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    return trained(tmp_path_factory, chats, "parallelism=tp2pp2")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    return trained(tmp_path_factory, chats, "adapter=lora", "optimizer.lr=1e-1")


# ---- the guide


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: Path, chats: Path, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(chats, "chats.jsonl")
    Path("prompts.jsonl").write_text(json.dumps(PROMPTS[2]) + "\n")
    _, _, module, *words = shlex.split(text.replace("RUN", str(single)))
    if module == "runner.evaluate":
        assert call_here(*evaluation([*words, "data.max_length=128"])) == 0
        return
    with mock.patch("sys.stdin", io.StringIO("Hi\n")):
        {"runner.generate": write_completions, "runner.chat": chat}[module](words)


# ---- evaluate


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    """Return the row of metrics of ``runner.evaluate``."""
    assert call_here(*evaluation([*words, f"run.output_dir={folder}", "run.name=again"])) == 0
    run = newest(folder)
    assert not (run / "export").exists()
    assert not list((run / "checkpoints").glob("*"))
    (row,) = rows(run, "eval/loss")
    return row


def test_a_run_is_evaluated_to_the_bit(
    tmp_path: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(tmp_path, f"checkpoint={single}") == rows(single, "eval/loss")[-1]
    out, err = capsys.readouterr()
    assert "eval/perplexity" in out
    assert re.search(r"^batches +eval: \d+, of at most 4 rows$", err, re.MULTILINE), err
    assert re.search(r"\beval: loss \d", err), err
    told = "".join(line for line in (out + err).splitlines(keepends=True) if "/" not in line)  # no paths
    for word in ("train loss", "train:", "step", "epoch", "lr", "FLOP", "all trained"):
        assert not re.search(rf"\b{word}", told), told


def test_a_checkpoint_of_only_weights_is_evaluated(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_on(tmp_path, chats, "checkpoint.model_only=true", "optimizer=sgd")
    row = evaluated(tmp_path / "own", f"checkpoint={run}")
    assert row == rows(run, "eval/loss")[-1]
    capsys.readouterr()
    assert call_here(*SMALL, f"checkpoint.resume={run}") == 2
    assert "holds only weights (checkpoint.model_only=true)" in capsys.readouterr().err


def test_only_weights_lack_a_reference_that_was_synced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synced = ("stage=dpo", "stage.sync_reference_every=2", "stage.sync_reference_mixup=0.5")
    run = run_here(tmp_path, *SMALL, *synced, "checkpoint.model_only=true", "data.max_samples=16")
    assert call_here(*evaluation([f"checkpoint={run}"])) == 2
    assert "and not those of the reference model" in capsys.readouterr().err


def test_a_reference_is_known_by_its_weights_and_not_by_its_path(
    tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(single / "export", "base")
    pairs = ("stage=dpo", "data.max_samples=16", "run.export=false", "run.max_steps=1", "run.device=cpu")
    run = run_here(tmp_path, *pairs, "model=hf", "model.path=base", "data.max_length=128")
    assert evaluated(tmp_path / "own", f"checkpoint={run}", "data=demo")["eval/loss"] > 0
    capsys.readouterr()
    weights = load_file("base/model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, "base/model.safetensors")
    assert call_here(*evaluation([f"checkpoint={run}", "data=demo"])) == 2
    assert "the reference model was model.init=pretrained of base; set" in capsys.readouterr().err


def test_an_evaluation_needs_memory_for_weights(
    tmp_path: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights fit into a memory that is too small for a train step."""
    words = [f"checkpoint={single}", f"run.output_dir={tmp_path}"]
    weights = json.loads((single / "preflight.json").read_text())["memory"][0]["weights"] / 2**20
    enough, short = (f"preflight.device_memory={share * weights:.3f}MiB" for share in (1.1, 0.5))
    assert call_here(*SMALL, enough) == 2
    assert call_here(*evaluation([*words, enough])) == 0
    assert json.loads((newest(tmp_path) / "run.json").read_text())["peak_memory"]["estimated"] is None
    assert call_here(*evaluation([*words, short])) == 2
    assert "the weights need" in capsys.readouterr().err


def test_an_evaluation_that_a_signal_stops_has_no_result(
    tmp_path: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled = ("stage._target_=tests.e2e.losses.Signalled", "+stage.training=false", "+stage.at=1")
    words = evaluation([f"checkpoint={single}", f"run.output_dir={tmp_path}", *signalled])
    assert call_here(*words) == 130
    told = capsys.readouterr().out
    assert told == "stopped before the evaluation was complete (SIGTERM); give the same command again\n"
    run = newest(tmp_path)
    assert json.loads((run / "run.json").read_text())["ended"] == "interrupted"
    assert not rows(run)


def test_a_run_on_the_demo_data_is_evaluated_on_a_file(tmp_path: Path, chats: Path) -> None:
    """The two commands of the README, one after the other."""
    run = run_here(tmp_path / "run", *SMALL, "run.max_steps=1")
    assert evaluated(tmp_path / "a", f"checkpoint={run}", f"data.eval={chats}")["eval/loss"] > 0
    assert f"data.train={chats}" in (newest(tmp_path / "a") / "run.json").read_text()


def test_another_stage(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a reference model, and options that only its own stage has, are no obstacle."""
    of_pairs = ("stage=dpo", "stage.beta=0.2", "run.max_steps=1")
    run = run_here(tmp_path / "run", *EXPORTING, *of_pairs)
    data = (f"data.eval={chats}", "data.max_length=128", "stage=sft")
    found = evaluated(tmp_path / "a", f"checkpoint={run}", *data)
    assert "eval/rewards/accuracies" not in found
    capsys.readouterr()
    exported = evaluated(tmp_path / "b", f"checkpoint={run}/export", "data=files", *data)
    assert found["eval/loss"] == pytest.approx(exported["eval/loss"], rel=1e-6)
    assert "eval/perplexity" in capsys.readouterr().out
    evaluated(tmp_path / "c", f"checkpoint={run}", *data, "stage.normalize=sequence")
    assert "eval/perplexity" not in capsys.readouterr().out


EXPERIMENT = """# @package _global_
defaults:
  - override /hook: [samples]
hook:
  samples: {max_new_tokens: 2}
checkpoint: {keep_best: eval/nll, keep_best_mode: min}
early_stopping: {metric: eval/nll, patience: 5}
run: {eval_every: 2}
stage: {label_smoothing: 0.1}
"""


def test_hooks_and_watched_metrics_of_an_experiment_do_not_evaluate(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPTS[2]) + "\n")
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    own, few = f"--config-dir={tmp_path}", ("run.max_steps=2", "run.export=false")
    hook = f"hook.samples.prompts={prompts}"  # which the evaluation leaves out
    run = trained_on(tmp_path / "run", chats, "experiment=mine", *few, hook, own)
    found = evaluated(tmp_path / "a", f"checkpoint={run}", own)
    assert found == rows(run, "eval/loss")[-1]
    words = evaluation([f"checkpoint={run}", own, "checkpoint.keep_best=eval/nll"])
    capsys.readouterr()
    assert call_here(*words, f"run.output_dir={tmp_path}/b") == 2
    assert "checkpoint.keep_best" in capsys.readouterr().err


def test_the_schedule_of_the_run_is_not_that_of_its_evaluation(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of few steps is evaluated, and the perplexity is that of the likelihood."""
    whole = ("run.max_steps=null", "run.epochs=1", "scheduler.warmup_steps=4", "stage.label_smoothing=0.1")
    run = trained_on(tmp_path / "run", chats, *whole, "run.export=false")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:9]))
    capsys.readouterr()
    found = evaluated(tmp_path / "a", f"checkpoint={run}", f"data.eval={few}")
    assert found["eval/nll"] < found["eval/loss"]
    assert f"{math.exp(found['eval/nll']):.6g}" in capsys.readouterr().out


def test_another_layout_and_other_data(tmp_path: Path, pipelined: Path, chats: Path) -> None:
    own = rows(pipelined, "eval/loss")[-1]["eval/loss"]
    assert evaluated(tmp_path / "a", f"checkpoint={pipelined}")["eval/loss"] == own
    on_one_rank = (f"checkpoint={pipelined}/checkpoints/step_00000004", "parallelism=single")
    assert evaluated(tmp_path / "b", *on_one_rank)["eval/loss"] == pytest.approx(own, rel=1e-6)
    other = evaluated(tmp_path / "c", *on_one_rank, f"data.eval={chats}")["eval/loss"]
    assert other != pytest.approx(own, rel=1e-3)
    exported = (f"checkpoint={pipelined}/export", "data=files", f"data.eval={chats}", "data.max_length=128")
    assert evaluated(tmp_path / "d", *exported)["eval/loss"] == pytest.approx(other, rel=1e-6)
    by_name = evaluated(tmp_path / "e", *on_one_rank, f"data.eval={{a: {chats}, b: {chats}}}")
    assert [by_name[f"eval/{name}loss"] for name in ("", "a/", "b/")] == [other] * 3


def test_an_adapter_is_evaluated(tmp_path: Path, adapted: Path, chats: Path) -> None:
    """With its run, or by itself on the base model that its folder names."""
    assert evaluated(tmp_path / "run", f"checkpoint={adapted}") == rows(adapted, "eval/loss")[-1]
    data = ("data=files", f"data.eval={chats}", "data.max_length=128")
    expected = evaluated(tmp_path / "same", f"checkpoint={adapted}", *data)["eval/loss"]
    own = evaluated(tmp_path / "folder", f"checkpoint={adapted}/export", *data)["eval/loss"]
    assert own == pytest.approx(expected, rel=1e-6)
    base = json.loads((adapted / "export" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert evaluated(tmp_path / "base", f"checkpoint={base}", *data)["eval/loss"] != pytest.approx(
        own, rel=1e-3
    )


@pytest.mark.parametrize("base", [{}, {"base_model_name_or_path": None}, {"base_model_name_or_path": ""}])
def test_an_adapter_that_names_no_base_model(tmp_path: Path, adapted: Path, base: dict[str, Any]) -> None:
    shutil.copytree(adapted / "export", tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["base_model_name_or_path"]
    file.write_text(json.dumps(config | base))
    with pytest.raises(ConfigError, match=r"^checkpoint: .*lora/adapter_config\.json names no base model"):
        open_model({"checkpoint": f"{tmp_path}/lora"})
    with pytest.raises(ConfigError, match=r"names no base model .* add model\.path=DIR"):
        evaluation([f"checkpoint={tmp_path}/lora"])
    named = [f"checkpoint={tmp_path}/lora", "model.path=base"]
    with pytest.raises(ConfigError, match=r"data\.eval: .*lora does not record on which data"):
        evaluation(named)
    assert "model.path=base" in evaluation([*named, "data=demo"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "checkpoint: is missing; give one"),
        (["checkpoint=a", "checkpoint=b"], "is given twice"),
        (["checkpoint=/no/such"], "is not a run, a checkpoint in one or a Hugging Face folder; name"),
    ],
)
def test_nothing_to_evaluate(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluation(words)


def test_no_data_to_evaluate_on(single: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = evaluation([f"checkpoint={single}/export", "data=files", f"data.train={chats}"])
    assert call_here(*words) == 2
    assert "run.evaluate_only: there is no evaluation data; set data.eval" in capsys.readouterr().err


# ---- generate


def completions(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "completions.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    write_completions([*words, f"prompts={prompts}", f"output={output}", "max_new_tokens=12"])
    return [json.loads(line) for line in output.read_text().splitlines()]


def expected(folder: Path) -> list[str]:
    """Return what transformers' own ``generate`` gives, one prompt at a time."""
    model, tokenizer = load_model(folder, False).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        if "messages" in prompt:
            chat = prompt["messages"]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            text = prompt["prompt"]
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=12, do_sample=False)
        found.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("run", ["single", "pipelined", "adapted"])
def test_completions_are_those_of_transformers(
    tmp_path: Path, run: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(run)
    wanted = expected(folder / "export")
    for place in (folder, folder / "export"):
        found = completions(tmp_path, f"checkpoint={place}")
        assert [row["completion"] for row in found] == wanted
        assert [
            {k: v for k, v in row.items() if k not in ("completion", "finish")} for row in found
        ] == PROMPTS
    assert len(set(wanted)) > 1


def test_prompts_have_the_system_turn_of_the_run(tmp_path: Path, single: Path) -> None:
    """The variables of the chat template are those of the run, too. Arguments of the command replace both."""
    run = shutil.copytree(single, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= {"default_system": "Count.", "chat_template_kwargs": {"style": "brief"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    given = {"checkpoint": str(run)}
    assert record_options(given) == RecordOptions(
        default_system="Count.", chat_template_kwargs={"style": "brief"}
    )
    own = given | {"system": "", "chat_template_kwargs": "{style: long}"}
    assert record_options(own) == RecordOptions(default_system="", chat_template_kwargs={"style": "long"})
    with pytest.raises(ConfigError, match="does not read style"):
        completions(tmp_path, f"checkpoint={run}")
    [first, *_] = completions(tmp_path, f"checkpoint={run}", "chat_template_kwargs={}")
    for place in (single, single / "export"):
        assert completions(tmp_path, f"checkpoint={place}", "system=Count.")[0] == first
        assert completions(tmp_path, f"checkpoint={place}")[0] != first


def longest_common(answer: str, completion: str) -> float:
    """Return the F-measure of the longest common subsequence of words (Lin, 2004)."""
    right, found = (re.findall(r"[a-z0-9]+", text.lower()) for text in (answer, completion))
    lengths = [[0] * (len(found) + 1) for _ in range(len(right) + 1)]
    for i, word in enumerate(right):
        for j, other in enumerate(found):
            best = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == other else best
    return 2 * lengths[-1][-1] / (len(right) + len(found)) if right and found else 0.0


def test_completions_are_compared_with_answers(
    tmp_path: Path, single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = expected(single / "export")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "completions.jsonl"
    answers = [f" {right[0]}\n", right[1] + "x", right[2]]
    records = [{**prompt, "gold": answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [f"checkpoint={single}/export", f"prompts={prompts}", "max_new_tokens=12", "batch_size=2"]
    write_completions([*words, f"output={output}", "answer=gold"])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["exact_match"] for row in found] == [True, False, True]
    assert "exact_match: 66.7% of 3 answers" in capsys.readouterr().err
    write_completions([*words, f"output={output}", "answer=gold", "metric=rougeL"])
    shares = [json.loads(line)["rougeL"] for line in output.read_text().splitlines()]
    assert shares == [
        pytest.approx(longest_common(record["gold"], text))
        for record, text in zip(records, right, strict=True)
    ]
    with pytest.raises(ConfigError, match="metric: compares completions with answers; give answer=FIELD"):
        write_completions([*words, "metric=rouge1"])
    with pytest.raises(
        ConfigError, match=r"answer=id: .*prompts.jsonl:1 has no text in it, but 7; name a field"
    ):
        write_completions([*words, "answer=id"])


def test_draws_depend_on_the_seed(tmp_path: Path, single: Path) -> None:
    def draw(seed: int) -> list[str]:
        options = ("temperature=2", "top_k=50", "top_p=0.9", f"seed={seed}", "batch_size=2", "strings=chat")
        return [row["completion"] for row in completions(tmp_path, f"checkpoint={single}/export", *options)]

    assert draw(1) == draw(1) != draw(2)


def test_a_completion_ends_with_a_stop_token(tmp_path: Path, single: Path) -> None:
    folder = tmp_path / "stops"
    model = AutoModelForCausalLM.from_pretrained(single / "export")
    tokenizer = AutoTokenizer.from_pretrained(single / "export")
    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        first = int(model(ids).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = completions(tmp_path, f"checkpoint={folder}")[2]
    assert found == PROMPTS[2] | {"completion": "", "finish": "stop"}
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)  # as that of an adapter on its base model
    tokenizer.save_pretrained(folder)
    assert completions(tmp_path, f"checkpoint={folder}")[2] == found


def test_the_most_probable_token_is_taken_whatever_the_model_suggests(tmp_path: Path, single: Path) -> None:
    folder = tmp_path / "suggests"
    shutil.copytree(single / "export", folder)
    model = read_checkpoint({"checkpoint": str(single)})[0].model
    expected, final = completions(tmp_path, f"checkpoint={folder}"), model.generate(folder, [5, 6], 12)
    amend(folder / "generation_config.json", {"repetition_penalty": 100.0, "do_sample": True})
    assert completions(tmp_path, f"checkpoint={folder}") == expected
    assert model.generate(folder, [5, 6], 12) == final


def test_an_adapter_with_only_what_peft_needs(tmp_path: Path, adapted: Path) -> None:
    """It names no task and has no tokenizer, and its base model suggests a way of decoding."""
    wanted = completions(tmp_path, f"checkpoint={adapted}/export")
    base = shutil.copytree(adapted / "base", tmp_path / "base")
    amend(base / "generation_config.json", {"repetition_penalty": 100.0, "do_sample": True})
    names = shutil.ignore_patterns("*token*", "chat_template.jinja")
    bare = shutil.copytree(adapted / "export", tmp_path / "bare", ignore=names)
    amend(bare / "adapter_config.json", {"task_type": None, "base_model_name_or_path": str(base)})
    assert completions(tmp_path, f"checkpoint={bare}") == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint=a"], "prompts: is missing. Usage: "),
        (["prompts=a"], "checkpoint: is missing"),
        (["promtps=a"], "promtps=a: is not KEY=VALUE with a known key; did you mean 'prompts'"),
        (["temperature=-1"], "temperature: must be a number of at least 0, got -1"),
        (["top_p=0", "temperature=1"], "top_p: must be above 0 and at most 1"),
        (["top_k=5"], "top_k: is not read with temperature=0; set temperature"),
        (["batch_size=1.5"], "batch_size: must be a whole number"),
        (["seed=99999999999999999999", "temperature=1"], "seed: must be a whole number below 2.53"),
        (["max_new_tokens=inf"], "max_new_tokens: must be a number of at least 1, got inf"),
        (["max_new_tokens=many"], "max_new_tokens: must be a number of at least 1, got many"),
        (["strings=messages"], "must be plain or chat"),
        (["chat_template_kwargs=brief"], "chat_template_kwargs: is 'brief'; give variables, such as"),
        (["chat_template_kwargs={messages: []}"], r"is '\{messages: \[\]\}'; give variables"),
        (["checkpoint=/no/such"], "/no/such is not a folder"),
    ],
)
def test_mistakes_of_generate(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    needed = {"checkpoint": str(tmp_path), "prompts": f"{tmp_path}/p.txt"}
    complete = (
        words if "is missing" in message else [*(f"{key}={path}" for key, path in needed.items()), *words]
    )
    with pytest.raises(ConfigError, match=message):
        write_completions(complete)


def test_a_model_that_transformers_refuses(tmp_path: Path, single: Path) -> None:
    """Such as one whose generation config has a value that is not allowed."""
    refuses = mock.patch.object(CheckpointModel, "load_model", side_effect=ValueError("max_new_tokens is 0"))
    with refuses, pytest.raises(ConfigError, match=r"checkpoint: cannot load .*max_new_tokens is 0"):
        completions(tmp_path, f"checkpoint={single}")


@pytest.mark.parametrize("damage", ["model.safetensors", "adapter_model.safetensors", "config.json"])
def test_a_damaged_model(tmp_path: Path, single: Path, adapted: Path, damage: str) -> None:
    """Its weights end early, or are not those of its config.json."""
    source = (adapted if damage.startswith("adapter") else single) / "export"
    folder = shutil.copytree(source, tmp_path / "damaged")
    if damage == "config.json":
        amend(folder / damage, {"intermediate_size": 32})
    else:
        os.truncate(folder / damage, 2000)
    with pytest.raises(ConfigError, match=r"^checkpoint: cannot load .*damaged \(.*\); export it again, or"):
        completions(tmp_path, f"checkpoint={folder}")


def test_an_output_that_cannot_be_written(tmp_path: Path, single: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    words = [f"checkpoint={single}/export", f"prompts={tmp_path}/p.txt", f"output={tmp_path}/no/x.jsonl"]
    with pytest.raises(ConfigError, match=r"output: cannot be written \(No such file.*\); name another"):
        write_completions(words)
    words[-1] = "output=/dev/full"
    with pytest.raises(TrainingError, match=r"output=/dev/full: could not be written \(No space"):
        write_completions(words)


@pytest.mark.parametrize("word", ["system=Count.", "chat_template_kwargs={style: c}"])
def test_arguments_that_only_conversations_read(tmp_path: Path, single: Path, word: str) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    words = [f"checkpoint={single}/export", f"prompts={tmp_path}/p.txt", word]
    with pytest.raises(ConfigError, match="is not read, because every prompt is a string; use strings=chat"):
        write_completions(words)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "system": "b"}, "a prompt that is a string takes no system; use"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "a prompt that is a string takes no tools; use"),
        ({"messages": [{"role": "user", "content": "a"}, ANSWER]}, "messages ends with an answer; remove"),
    ],
)
def test_a_prompt_that_cannot_be_read(
    tmp_path: Path, single: Path, record: dict[str, Any], message: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=rf"p\.jsonl:1: {message}"):
        write_completions([f"checkpoint={single}/export", f"prompts={prompts}"])


def test_a_prompt_is_all_of_its_record(single: Path) -> None:
    """With a string as a user's turn: the system turn, and the variables of the template."""
    tokenizer = AutoTokenizer.from_pretrained(single / "export")
    tokenizer.chat_template = "{{ style }}|{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    record = {"prompt": "a", "system": "b", "chat_template_kwargs": {"style": "c"}, "completion": "d"}
    path = single / "prompt.jsonl"
    path.write_text(json.dumps(record))
    (prompt,) = read_prompts(str(path), RecordOptions(strings="chat", default_system="not this one"))
    assert tokenizer.decode(prompt.token_ids(tokenizer)) == "c|system: b|user: a|"
    assert prompt.completed({"completion": "e"}) == {**record, "record_completion": "d", "completion": "e"}
    alpaca = {"instruction": "a", "input": "f", "output": "g", "system": "b"}
    path.write_text(json.dumps(alpaca | {"chat_template_kwargs": {"style": "c"}}))
    (question,) = read_prompts(str(path), RecordOptions())
    assert tokenizer.decode(question.token_ids(tokenizer)) == "c|system: b|user: a\nf|"
    path.write_text(json.dumps({"prompt": "a", "query": "f", "chat_template_kwargs": {"style": "c"}}))
    (named,) = read_prompts(str(path), RecordOptions())
    assert tokenizer.decode(named.token_ids(tokenizer)) == "c|user: a\nf|"
    path.write_text('{"prompt": "a", "images": ["b.png"]}')
    with pytest.raises(ConfigError, match=r":1: has images, audio or video"):
        read_prompts(str(path), RecordOptions())
    path.write_text('{"prompt": "a"}\n{"instruction": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}')
    options = RecordOptions(strings="chat", default_system="d", chat_template_kwargs={"style": "c"})
    texts = [tokenizer.decode(prompt.token_ids(tokenizer)) for prompt in read_prompts(str(path), options)]
    assert texts == ["c|system: d|user: a|"] * 3
    tokenizer.chat_template = (
        "{{ style }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not render message 0, of the role system"):
        prompt.token_ids(tokenizer)


def test_a_plain_prompt_does_not_end_with_an_end() -> None:
    """The tokenizer appends one. One that is written in the prompt is kept."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    for text in ("one", "one<|im_end|>"):
        words = [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert tokenizer(text)["input_ids"] == [*words, 2]
        assert Prompt({}, "x:1", text, None, {}).token_ids(tokenizer) == words


# ---- chat


def said(lines: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with mock.patch("sys.stdin", io.StringIO(lines)):
        chat([*words, "max_new_tokens=12"])
    return capsys.readouterr().out.splitlines()


def test_a_conversation(pipelined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = expected(pipelined / "export")[0]
    question = PROMPTS[0]["messages"][0]["content"]
    first = said(f"{question}\n\n/quit\nnever asked\n", capsys, f"checkpoint={pipelined}")
    assert "\n".join(first) == answer
    again = said(f"{question}\n/clear\n{question}\n", capsys, f"checkpoint={pipelined}/export")
    assert "\n".join(again) == f"{answer}\n{answer}"


def test_a_conversation_goes_on(tmp_path: Path, single: Path) -> None:
    seen: list[list[dict[str, str]]] = []
    folder = shutil.copytree(single / "export", tmp_path / "styled")
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{{ style }}")

    def reply(_: Any, template: Any, messages: list[dict[str, str]], __: Any) -> str:
        assert template.kwargs == {"style": "c"}
        seen.append([dict(message) for message in messages])
        return f"answer {len(seen)}"

    with mock.patch("sys.stdin", io.StringIO("a\nb\n")), mock.patch("runner.commands.chat.answer", reply):
        chat([f"checkpoint={folder}", "system=Be kind.", "chat_template_kwargs={style: c}"])
    assert [message["content"] for message in seen[1]] == ["Be kind.", "a", "answer 1", "b"]
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "user"]


def test_a_line_that_is_no_utf8_is_read(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="ascii")
    with mock.patch("sys.stdin", lines):
        chat([f"checkpoint={single}/export", "max_new_tokens=2"])
    assert capsys.readouterr().out


def test_a_reader_that_has_read_enough_ends_the_command() -> None:
    def task(_: Sequence[str]) -> None:
        raise BrokenPipeError

    with mock.patch("sys.argv", ["generate"]), mock.patch("runner.cli.discard_output") as discard:
        assert run_or_answer(task, None) == 0
    discard.assert_called_once()


def test_a_model_without_a_chat_template(tmp_path: Path, single: Path) -> None:
    AutoModelForCausalLM.from_pretrained(single / "export").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(single / "export")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no chat template; train with model\.chat_template, or use"):
        chat([f"checkpoint={tmp_path}"])
    of_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for template, word, message in (
        ("{{ raise_exception('no system role') }}", "system=", "refuses .*no system role"),
        (of_users, "system=Be kind.", "does not render message 0, of the role system"),
        (of_users, "chat_template_kwargs={enable_thinkng: false}", "does not read enable_thinkng"),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        refuses = pytest.raises(ConfigError, match=f"the conversation: .* {message}")
        with refuses, mock.patch("sys.stdin", io.StringIO("Hi\n")):
            chat([f"checkpoint={tmp_path}", word])
