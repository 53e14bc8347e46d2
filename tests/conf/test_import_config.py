"""Configurations of LLaMA-Factory, axolotl and TRL as commands: each one composes, and has the values."""

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from transformers import TrainingArguments

from components.contracts.errors import MISTAKE
from runner.commands.import_config import main
from runner.commands.importing.translation import Translation
from runner.conf_folder import config_dir
from runner.config.command_line import hydra_value
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from runner.config.unknown_keys import documents
from runner.launch.unread_options import check_unread_options

LLAMAFACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: identity, alpaca_en_demo
template: llama3
cutoff_len: 4096
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 1800
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
enable_thinking: false
"""
DEEPSPEED = "model_name_or_path: x\ndataset: a\nstage: {}\nfinetuning_type: full\ndeepspeed: ds_z3.json\n"
MERGE = "model_name_or_path: x\nadapter_name_or_path: saves/x\nexport_dir: models/x\n"
FREEZE = "freeze_trainable_layers: 2\n"
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
model_type: LlamaForCausalLM
load_in_8bit: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
val_set_size: 0.05
dataset_prepared_path:
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
wandb_project: chats
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 2
special_tokens: {pad_token: <|end_of_text|>}
"""
AXOLOTL_DPO = """
base_model: Qwen/Qwen2.5-0.5B
rl: ipo
rl_beta: 0.2
chat_template: chatml
datasets:
  - path: data/pairs.jsonl
    ds_type: json
    type: chat_template.default
    split: train[:90%]
    field_messages: dialog
    field_chosen: better
    shards: 4
    message_property_mappings: {role: who, content: text}
    roles: {user: [human], assistant: [gpt]}
  - {path: org/more, type: chat_template.default, split: dev, name: en, revision: v2}
learning_rate: 1e-6
dp_shard_size: 2
tensor_parallel_size: 2
deepspeed: deepspeed_configs/zero2.json
"""
ACCELERATE = r"""
# Eight GPUs
accelerate launch --config_file=deepspeed_zero3.yaml --num_processes 8 trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \
    --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' --eval_strategy epoch --use_peft --lora_r 32 --lora_alpha=16 \
    --lora_target_modules q_proj k_proj v_proj --no_remove_unused_columns --run_name "it's *one: 1%"
"""
TRL_DPO = (
    "trl dpo --model_name_or_path m --dataset_name pairs.json --loss_type hinge --max_steps 50 "
    "--num_train_epochs 2 --bf16 no"
)
TRAINER = {"optimizer.weight_decay": 0.0, "run.seed": 42, "checkpoint.keep_last": 0, "data.packing": "none"}
"""The defaults of transformers' Trainer."""


@dataclasses.dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.out.replace("\\\n", " "), comments=True)[3:]

    def composed(self) -> Any:
        """Compose the printed command and build everything it describes."""
        with initialize_config_dir(config_dir(), version_base="1.3"):
            config = compose("config", ["run.name=x", *self.words])
        node = OmegaConf.to_container(config, resolve=True)
        assert isinstance(node, dict)
        if "dataset_info" in node["data"]:  # is read when it is built
            node["data"] |= {
                "dataset_info": str(Path(__file__).parent / "dataset_info.json"),
                "dataset": ["chats"] * len(node["data"]["shares"] or [1]),
            }
        experiment = build_experiment(node, ConfigSources())
        experiment.data.check_kind(experiment.stage.kind)
        given = ConfigSources(overrides=tuple(self.words))
        check_unread_options(experiment, node, given)
        return config


Run = Callable[..., Answer]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command on a file with the text."""

    def run(tool: str, text: str | None, *arguments: str, suffix: str = ".yaml") -> Answer:
        path = tmp_path / f"theirs{suffix}"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(sys, "argv", ["import_config", tool, str(path), *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return run


def check(answer: Answer, expected: Mapping[str, object]) -> None:
    assert answer.code == 0, answer.err
    config = answer.composed()
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


def test_llamafactory(imported: Run) -> None:
    answer = imported("llamafactory", LLAMAFACTORY, "ranks=4")
    expected = {
        "model.path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "model.trust_remote_code": True,
        "model.chat_template": "llama3",
        "data.dataset_info": "data",
        "data.dataset": ["identity", "alpaca_en_demo"],
        "data.max_length": 4096,
        "data.packing": "none",
        "data.eval_fraction": 0.1,
        "data.chat_template_kwargs": None,
        "adapter.r": 16,
        "adapter.alpha": 32,
        "adapter.target_modules": "all-linear",
        "optimizer.lr": 1e-4,
        "optimizer.betas": [0.9, 0.999],
        "scheduler.warmup_ratio": 0.1,
        "run.global_batch_size": 32,
        "run.micro_batch_size": 1,
        "run.epochs": 3,
        "run.eval_every": 500,
        "run.dtype": "bf16",
        "run.log_every": 10,
        "parallelism.dp": 4,
        "parallelism.activation_checkpointing": "full",
        "checkpoint.save_every": 500,
    }
    check(answer, TRAINER | expected)
    assert "scheduler=cosine" in answer.words
    assert "#   model.trust_remote_code: leave it out if the model brings no code" in answer.out
    _, _, comments = answer.out.partition("# Not needed:")
    named = {line.split()[1].rstrip(":") for line in comments.splitlines() if line.startswith("#  ")}
    assert named == {
        "do_train",
        "overwrite_cache",
        "plot_loss",
        "dataloader_num_workers",
        "per_device_eval_batch_size",
        "enable_thinking",
    }
    assert "No equivalent" not in answer.out


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("pref_loss: sigmoid\npref_ftx: 0.2", {"stage.loss": "sigmoid", "stage.rpo_alpha": 0.2}),
        ("pref_loss: orpo\npref_beta: 0.3", {"stage.beta": 0.3, "stage._target_": "components.losses.ORPO"}),
        ("pref_loss: simpo", {"stage.loss": "simpo", "stage.beta": 0.1, "stage.simpo_gamma": 0.5}),
    ],
)
def test_losses_of_llamafactory_that_are_stages_here(
    imported: Run, added: str, expected: dict[str, object]
) -> None:
    """The defaults are LLaMA-Factory's: rate 5e-5, linear, three epochs of batches of 8, 2048 tokens."""
    answer = imported("llamafactory", DEEPSPEED.format("dpo") + added)
    rest = {"optimizer.lr": 5e-5, "run.epochs": 3, "run.global_batch_size": 8, "data.max_length": 2048}
    check(answer, TRAINER | rest | expected)
    assert {"scheduler=linear", "parallelism=fsdp2"} <= {*answer.words}
    assert "parallelism.reshard_after_forward=false" in answer.out
    assert not any(word.startswith("adapter") for word in answer.words)


def test_an_adapter_that_goes_on_with_preferences(imported: Run) -> None:
    """The reference of LLaMA-Factory is the model without the adapter, and targets are text or a list."""
    lora = DEEPSPEED.format("dpo").replace("full", "lora").replace("deepspeed: ds_z3.json\n", "")
    answer = imported("llamafactory", lora + "template: qwen\nadapter_name_or_path: saves/sft\n")
    assert {"adapter.path=saves/sft", "stage.reference=adapter_off"} <= {*answer.words}
    assert "#   template: the template of the tokenizer is used" in answer.out
    answer = imported("llamafactory", lora + "lora_target: all\nlora_rank: 4\nadapter_name_or_path: /x/sft\n")
    assert not any(word.startswith(("adapter.target_modules", "adapter.r=")) for word in answer.words)
    assert "#   lora_target: the saved adapter has it" in answer.out
    assert "#   adapter.path: if an earlier training writes this folder" in answer.out
    for given in ("q_proj, v_proj", "[q_proj, v_proj]"):
        check(
            imported("llamafactory", lora + f"lora_target: {given}\n"),
            {"adapter.target_modules": ["q_proj", "v_proj"]},
        )


def test_evaluations_without_data_are_left_out(imported: Run) -> None:
    text = DEEPSPEED.format("sft") + "val_size: 5\neval_strategy: steps\neval_steps: 3\n"
    answer = imported("llamafactory", text + "load_best_model_at_end: true\n")
    assert not any(word.startswith(("run.eval_every", "checkpoint.keep_best")) for word in answer.words)
    assert "#   eval_steps: there is no evaluation data" in answer.out
    answer = imported(
        "llamafactory", text.replace("val_size: 5", "val_size: 0.1") + "load_best_model_at_end: true\n"
    )
    assert {"run.eval_every=3", "checkpoint.keep_best=eval/loss"} <= {*answer.words}
    assert "#   checkpoint.keep_best: the export of a run is of its last step" in answer.out


def test_splits_of_a_local_folder(imported: Run, tmp_path: Path) -> None:
    """A folder is not a data set of the hub: its files of a split are named."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    text = f"model_name_or_path: m\ndataset_name: {tmp_path}\nmax_length: null\n"
    answer = imported("trl", text + "eval_strategy: steps\neval_steps: 2\n", "stage=sft")
    check(answer, {"data.train": f"{tmp_path}/train*", "data.eval": f"{tmp_path}/test*"})
    assert "#   data.max_length: null means no limit" in answer.out
    line = "trl reward --model_name_or_path m --dataset_name d"
    assert "stage=rm" in imported("trl", line, suffix=".sh").words


def test_pretraining_and_kto_of_llamafactory(imported: Run) -> None:
    check(imported("llamafactory", DEEPSPEED.format("pt")), {"data.packing": "concat", "stage.kind": "text"})
    text = json.dumps({**yaml.safe_load(DEEPSPEED.format("kto")), "kto_chosen_weight": 1.5})
    check(imported("llamafactory", text, suffix=".json"), {"stage.desirable_weight": 1.5})


def test_axolotl(imported: Run) -> None:
    answer = imported("axolotl", AXOLOTL, "ranks=2")
    expected = {
        "data.train": "hub:mhenrichsen/alpaca_2k_test",
        "data.format": "alpaca",
        "data.eval_fraction": 0.05,
        "data.packing": "bfd",
        "data.max_length": 4096,
        "adapter.r": 32,
        "adapter.alpha": 16,
        "adapter.dropout": 0.05,
        "adapter.target_modules": "all-linear",
        "adapter.modules_to_save": ["embed_tokens", "lm_head"],
        "optimizer.lr": 2e-4,
        "optimizer.betas": [0.9, 0.999],
        "optimizer._target_": "bitsandbytes.optim.AdamW8bit",
        "scheduler.warmup_ratio": 0.03,
        "run.global_batch_size": 16,
        "run.epochs": 4,
        "run.eval_every": 0.0625,
        "run.dtype": "bf16",
        "checkpoint.save_every": 0.125,
        "checkpoint.keep_last": 4,
        "logger.wandb.project": "chats",
    }
    check(answer, expected)
    assert OmegaConf.select(answer.composed(), "scheduler.min_lr") == pytest.approx(2e-5)
    for named in (
        "load_in_8bit=True: use adapter=qlora (in 4 bits)",
        "special_tokens=",
        "tf32: ",
        "dataset_p",
    ):
        assert f"#   {named}" in answer.out


def test_preferences_of_axolotl(imported: Run) -> None:
    answer = imported("axolotl", AXOLOTL_DPO)
    columns = {"messages": "dialog", "role": "who", "content": "text", "chosen": "better"}
    more = {"path": "hub:org/more", "split": "dev", "subset": "en", "revision": "v2"}
    expected = {
        "stage.loss": "ipo",
        "stage.beta": 0.2,
        "data.sources": [{"path": "data/pairs.jsonl", "columns": columns}, more],
        "data.split": None,
        "data.format": "preference",
        "data.roles": {"human": "user", "gpt": "assistant"},
        "data.max_length": 512,
        "data.packing": "none",
        "model.chat_template": "chatml",
        "parallelism.dp": 2,
        "parallelism.tp": 2,
        "run.global_batch_size": 2,
        "run.epochs": 1,
        "checkpoint.save_every_epochs": 1,
    }
    check(answer, expected)
    for named in ("datasets: shards=4: ", "datasets: split=train[:90%]: ", "datasets: roles: "):
        assert f"#   {named}" in answer.out


def test_reward_models_of_other_tools(imported: Run) -> None:
    target = {"stage._target_": "components.losses.Reward"}
    text = "base_model: x\nlearning_rate: 1e-3\nreward_model: true\ncenter_rewards_coefficient: 0.01\n"
    found = imported("axolotl", text + "datasets: [{path: a.jsonl, type: chat_template.default}]")
    check(found, target | {"stage.center_rewards_coefficient": 0.01, "data.format": "preference"})
    found = imported("axolotl", text + "datasets: [{path: a.jsonl, type: bradley_terry.chat_template}]")
    turns = {"data.format": "preference", "data.strings": "chat", "data.columns": {"prompt": "input"}}
    check(found, target | turns)
    assert "data.format:" not in found.out
    check(imported("llamafactory", "model_name_or_path: m\nstage: rm\ndataset: pairs"), target)


def test_a_command_of_trl_with_a_file_of_options(imported: Run, tmp_path: Path) -> None:
    options = "model_name_or_path: x\ndataset_name: org/a\npush_to_hub: true\nmax_steps: 7\n"
    (tmp_path / "sft.yaml").write_text(options)
    answer = imported("trl", "trl sft --config sft.yaml --learning_rate 1e-5", suffix=".sh")
    check(answer, {"model.path": "x", "optimizer.lr": 1e-5, "run.max_steps": 7, "data.train": "hub:org/a"})
    assert "#   push_to_hub=True: upload the export after the run: hf upload NAME/MODEL" in answer.out
    missing = imported("trl", "trl sft --config other.yaml", suffix=".sh")
    assert (missing.code, "other.yaml: cannot be read" in missing.err) == (2, True)


def test_options_without_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["import_config", "trl", "--model_name_or_path", "x"])
    with pytest.raises(SystemExit):
        main()
    assert "--model_name_or_path: is not a file; write the command line to a" in capsys.readouterr().err


def test_a_mixture_of_trl(imported: Run) -> None:
    text = (
        "model_name_or_path: x\nlearning_rate: 1e-5\ntest_split_size: 0.1\ndatasets:\n"
        "  - {path: org/a, name: chat, split: test, columns: [messages], data_dir: d}\n"
        "  - {path: json, name: chat, data_files: [b.jsonl]}\n"
    )
    answer = imported("trl", text, "stage=sft")
    sources = [{"path": "hub:org/a", "split": "test", "subset": "chat"}, {"path": "b.jsonl"}]
    check(answer, {"data.sources": sources, "data.eval_fraction": 0.1})
    assert "#   datasets: data_dir=d: use the options of data" in answer.out
    assert "#   datasets: name=chat: only a data set of the hub has one" in answer.out


def test_what_an_entry_of_axolotl_loses_is_listed(imported: Run) -> None:
    entry = (
        "{path: a.jsonl, type: chat_template, roles_to_train: [assistant, tool], train_on_eos: last, "
        "chat_template: llama3, message_property_mappings: {role: role, content: text, name: who}}"
    )
    told = imported("axolotl", f"base_model: x\nlearning_rate: 1e-3\ndatasets: [{entry}]").out
    for words in (
        "datasets: roles_to_train=['assistant', 'tool']",
        "datasets: train_on_eos=last",
        "datasets: chat_template=llama3",
        "datasets: message_property_mappings.name=who",
    ):
        assert words in told
    usual = "{path: a.jsonl, type: chat_template, roles_to_train: [assistant], train_on_eos: turn}"
    plain = imported("axolotl", f"base_model: x\nlearning_rate: 1e-3\ndatasets: [{usual}]").out
    assert "datasets:" not in plain


def test_the_flag_of_a_turn_of_axolotl(imported: Run) -> None:
    entry = "{path: a.jsonl, type: chat_template, message_field_training: training}"
    answer = imported("axolotl", f"base_model: x\nlearning_rate: 1e-3\ndatasets: [{entry}]")
    check(answer, {"data.columns": {"train": "training"}})
    assert "message_field_training" not in answer.out


def test_fields_of_a_type_of_axolotl(imported: Run) -> None:
    kind = '{field_prompt: q, field_chosen: good, prompt_format: "Q {prompt}", system_prompt: Be brief.}'
    answer = imported("axolotl", f"base_model: x\nrl: dpo\ndatasets: [{{path: a.jsonl, type: {kind}}}]")
    check(answer, {"data.columns": {"prompt": "q", "chosen": "good"}})
    assert "datasets: type.prompt_format=Q {prompt}: write it in the records" in answer.out
    assert "datasets: type.system_prompt=Be brief." in answer.out


def test_test_data_of_axolotl(imported: Run) -> None:
    base = "base_model: x\nlearning_rate: 1e-3\n"
    base += "datasets: [{path: org/a, type: chat_template}]\ntest_datasets: "
    split = imported("axolotl", base + "[{path: org/a, type: alpaca, split: test}]")
    check(split, {"data.eval": "hub:org/a", "data.eval_split": "test", "data.long_samples": "drop"})
    assert "test_datasets: format: data.format holds for all data" in split.out
    kind = "type: chat_template"
    two = imported("axolotl", f"{base}[{{path: a.jsonl, {kind}}}, {{path: b.jsonl, {kind}}}]")
    check(two, {"data.eval": {"test0": "a.jsonl", "test1": "b.jsonl"}})
    sources = base.replace("[{", f"[{{path: org/b, {kind}}}, {{name: en, ")
    own = imported("axolotl", f"{sources}[{{path: org/a, {kind}, name: en}}]")
    check(own, {"data.subset": None, "data.sources[1].subset": "en"})
    assert "test_datasets: subset: data.subset holds for all data" in own.out


def test_early_stopping_of_llamafactory(imported: Run) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\nval_size: 0.1\n"
    text += "eval_strategy: steps\neval_steps: 5\n"
    answer = imported("llamafactory", f"{text}early_stopping_steps: 3\n")
    check(answer, {"early_stopping.metric": "eval/loss", "early_stopping.patience": 3})


def test_data_of_trl_that_is_not_read(imported: Run) -> None:
    text = "model_name_or_path: m\nlearning_rate: 1e-5\ndataset_name: a.jsonl\n"
    local = imported("trl", f"{text}dataset_config: en\ndataset_train_split: train\n", "stage=sft")
    check(local, {"data.train": "a.jsonl", "data.split": None, "data.subset": None})
    assert "dataset_config=en: only a data set of the hub has subsets" in local.out
    wrapped = imported("trl", f"{text}packing: true\npacking_strategy: wrapped\n", "stage=sft")
    check(wrapped, {"data.packing": "bfd"})
    mixture = imported("trl", f"{text}datasets: [{{path: b.jsonl}}]\n", "stage=sft")
    check(mixture, {"data.train": None, "data.sources": [{"path": "b.jsonl"}]})
    assert "dataset_name: it is not read with datasets" in mixture.out


@pytest.mark.parametrize(("nodes", "batch"), [("2", 16), ("1:4", 8)])
def test_ranks_of_torchrun(imported: Run, nodes: str, batch: int) -> None:
    data = "--dataset_name org/a --run_name 2024_01_15 --per_device_train_batch_size 1"
    command = f"torchrun --nnodes {nodes} --nproc_per_node 8 sft.py --model_name_or_path m {data}"
    ranks = [] if nodes == "2" else ["ranks=8"]
    answer = imported("trl", command, *ranks, suffix=".sh")
    check(answer, {"run.global_batch_size": batch, "run.name": "2024_01_15"})
    assert imported("trl", command, suffix=".sh").out.count("ranks: it is not given") == (nodes != "2")


@pytest.mark.parametrize(
    ("launcher", "stage", "batch"),
    [
        ("torchrun --nproc_per_node=8 sft.py", "sft", 64),
        ("accelerate launch --multi_gpu dpo.py", "dpo", 8),
        ("accelerate launch --config_file=x.yaml trl/scripts/dpo.py", "dpo", 8),
        ("accelerate launch --config_file my_dpo sft.py", "sft", 8),
        ("sft.py", "sft", 8),
    ],
)
def test_the_script_after_options_of_a_launcher(imported: Run, launcher: str, stage: str, batch: int) -> None:
    answer = imported("trl", f"{launcher} --model_name_or_path m --dataset_name a.jsonl", suffix=".sh")
    assert {f"stage={stage}", f"run.global_batch_size={batch}"} <= {*answer.words}


def test_plain_text_of_axolotl_is_pretraining(imported: Run) -> None:
    text = "base_model: x\nlearning_rate: 1e-3\ndatasets: [{path: a.txt, type: completion}]"
    check(imported("axolotl", text), {"stage.kind": "text", "data.train": "a.txt"})


def test_a_command_line_of_accelerate(imported: Run) -> None:
    answer = imported("trl", ACCELERATE, suffix=".txt")
    expected = {
        "stage.kind": "chat",
        "data.train": "hub:trl-lib/Capybara",
        "data.packing": "bfd",
        "adapter.r": 32,
        "adapter.dropout": 0.05,
        "adapter.target_modules": ["q_proj", "k_proj", "v_proj"],
        "optimizer.lr": 2e-4,
        "run.global_batch_size": 128,
        "run.epochs": 1,
        "run.eval_every": 0,
        "run.eval_every_epochs": 1,
        "data.eval_split": "test",
        "run.name": "it's *one: 1%",
        "run.dtype": "bf16",
        "run.log_every": 10,
        "parallelism.dp": 8,
    }
    check(answer, TRAINER | expected | {"data.packing": "bfd"})
    assert "#   eos_token=<|im_end|>: " in answer.out
    assert "#   remove_unused_columns: " in answer.out


@pytest.mark.parametrize(
    ("stage", "added", "expected"),
    [
        ("sft", "", {"optimizer.lr": 2e-5, "stage.kind": "chat"}),
        ("dpo", "loss_type: hinge", {"optimizer.lr": 1e-6, "stage.loss": "hinge"}),
        ("dpo", "label_smoothing: 0.1", {"stage.loss": "sigmoid", "stage.label_smoothing": 0.0}),
        ("dpo", "label_smoothing: 0.1\nloss_type: robust", {"stage.label_smoothing": 0.1}),
        (
            "dpo",
            "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nuse_weighting: false",
            {
                "stage.loss": ["sigmoid", "bco_pair", "sft"],
                "stage.loss_weights": [0.8, 0.2, 1.0],
                "stage.wpo": False,
            },
        ),
        (
            "kto",
            "sync_ref_model: true\nref_model_sync_steps: 64",
            {"stage.sync_reference_every": 64, "stage.sync_reference_mixup": 0.6},
        ),
        ("dpo", "sync_ref_model: false\nref_model_sync_steps: 64", {"stage.sync_reference_every": 0}),
        ("kto", "", {"data.shuffle": False}),
        (
            "rm",
            "center_rewards_coefficient: 0.01",
            {"optimizer.lr": 1e-4, "stage.center_rewards_coefficient": 0.01},
        ),
        (
            "orpo",
            "beta: 0.2\nuse_peft: true",
            {"stage.beta": 0.2, "adapter.target_modules": ["q_proj", "v_proj"]},
        ),
        ("cpo", "loss_type: simpo\ncpo_alpha: 0", {"stage.loss": "simpo", "stage.cpo_alpha": 0}),
        ("sft", "use_peft: true\nload_in_4bit: true", {"adapter.quantize": "nf4", "adapter.r": 16}),
        ("sft", "use_peft: true\nuse_dora: true", {"adapter.dora": True}),
        ("sft", "warmup_steps: 0.1\nlr_scheduler_type: constant", {"scheduler.warmup_ratio": 0.0}),
        ("sft", "warmup_steps: 10", {"scheduler.warmup_steps": 10}),
        ("sft", "gradient_checkpointing: false", {"parallelism.activation_checkpointing": "none"}),
        ("sft", "completion_only_loss: false", {"data.train_on_prompt": True}),
        (
            "sft",
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.5}",
            {"scheduler.min_lr": 1e-5},
        ),
    ],
)
def test_trl(imported: Run, stage: str, added: str, expected: dict[str, object]) -> None:
    text = f"model_name_or_path: m\ndataset_name: org/chats\n{added}"
    check(imported("trl", text, f"stage={stage}"), TRAINER | {"run.global_batch_size": 8} | expected)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_an_option_that_trl_reads_in_a_loss_without_equivalent_is_needed(imported: Run, loss: str) -> None:
    text = f"model_name_or_path: m\ndataset_name: org/chats\nlabel_smoothing: 0.1\nloss_type: {loss}"
    assert "stage.label_smoothing=0.1" in imported("trl", text, "stage=dpo").out


def test_a_command_line_of_trl(imported: Run) -> None:
    answer = imported("trl", TRL_DPO, "ranks=2", suffix=".sh")
    assert "#   num_train_epochs: max_steps takes precedence" in answer.out
    check(answer, {"run.max_steps": 50, "run.epochs": None, "run.dtype": "fp32", "data.train": "pairs.json"})


@pytest.mark.parametrize(
    ("tool", "text", "arguments", "suffix", "said"),
    [
        ("litgpt", "", [], ".yaml", "litgpt: is not a tool"),
        ("trl", "", [], ".toml", "is not a configuration of trl; give a file .yaml"),
        ("axolotl", None, [], ".yaml", "cannot be read"),
        ("axolotl", "a: [", [], ".yaml", "cannot be parsed"),
        ("axolotl", "- a", [], ".yaml", "is not a mapping"),
        ("axolotl", "base_model: x\nmicro_batch_sise: 2", [], ".yaml", "did you mean 'micro_batch_size'?"),
        ("llamafactory", DEEPSPEED.format("ppo"), [], ".yaml", "stage: ppo"),
        ("llamafactory", DEEPSPEED.format("sft"), ["rank=2"], ".yaml", "did you mean 'ranks'?"),
        ("llamafactory", DEEPSPEED.format("sft"), ["ranks=0"], ".yaml", "ranks: must be a number"),
        ("llamafactory", DEEPSPEED.format("sft") + "max_steps: many", [], ".yaml", "max_steps: must be"),
        ("trl", "model_name_or_path: m\ndataset_name: d", [], ".yaml", "add one to the command: stage=sft"),
        ("trl", "sft.py x --learning_rate 1", [], ".txt", "x is not --OPTION"),
        ("trl", "sft.py --dataset_name 'x", [], ".txt", "cannot be parsed"),
        ("trl", "sft.py --dataset_name x", [], ".txt", "model_name_or_path"),
        ("axolotl", "base_model: x\ndatasets: [a]", [], ".yaml", "datasets: must be"),
        ("llamafactory", MERGE, [], ".yaml", "runner.export adapter=saves/x merge=true output=models/x."),
        (
            "llamafactory",
            "do_predict: true\ndataset: a\nadapter_name_or_path: y",
            [],
            ".yaml",
            "runner.generate",
        ),
        ("llamafactory", "model_name_or_path: y\ntemplate: qwen", [], ".yaml", "runner.chat checkpoint=y"),
        ("axolotl", "base_model: x\ntensor_parallel_size: 2", ["ranks=3"], ".yaml", "ranks: 3"),
    ],
)
def test_mistakes(
    imported: Run, tool: str, text: str | None, arguments: list[str], suffix: str, said: str
) -> None:
    answer = imported(tool, text, *arguments, suffix=suffix)
    assert answer.code == MISTAKE
    assert said in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not answer.out


def unknown(tool: str, names: set[str]) -> set[str]:
    """Return the names that the dictionary does not have."""
    work = Translation(tool, {})
    kinds = ("not_needed", "no_equivalent")
    return {
        name
        for name in names
        if work.row(name) is None and not any(work.reason(kind, name, exact=False) for kind in kinds)
    }


LF = "model_name_or_path: m\ndataset: a\nbf16: true\nstage: {}\n"
AX = "base_model: x\nlearning_rate: 1e-3\n"
ALPACA = f"{AX}datasets: [{{path: a.jsonl, type: alpaca}}]\n"


@pytest.mark.parametrize(
    ("tool", "text", "expected", "said"),
    [
        ("llamafactory", LF.format("pt") + "packing: true", {"data.packing": "concat"}, ""),
        ("llamafactory", LF.format("pt") + "packing: false", {"data.packing": "none"}, ""),
        (
            "llamafactory",
            LF.format("pt").replace("dataset: a", "dataset: a,b")
            + 'mix_strategy: interleave_over\ninterleave_probs: "0.7, 0.3"',
            {"data.shares": [0.7, 0.3], "data.stopping_strategy": "all_exhausted"},
            "data.shares: they are shares of tokens here",
        ),
        (
            "llamafactory",
            LF.format("sft").replace("dataset: a", "dataset: a,b") + "mix_strategy: interleave_under",
            {"data.shares": [1.0, 1.0], "data.stopping_strategy": "first_exhausted"},
            "",
        ),
        (
            "llamafactory",
            LF.format("sft").replace("dataset: a", "dataset: a,b")
            + 'mix_strategy: interleave_once\ninterleave_probs: "0.7, 0.3"',
            {"data.shares": None},
            "#   mix_strategy: an epoch has every sample once without data.shares, too",
        ),
        (
            "llamafactory",
            LF.format("sft").replace("dataset: a", "dataset: a,b")
            + "mix_strategy: interleave_once\ndisable_shuffling: true",
            {"data.shares": None, "data.shuffle": False},
            "#   data.shuffle: one data set follows another here; LLaMA-Factory interleaves them",
        ),
        (
            "llamafactory",
            LF.format("sft") + "mix_strategy: interleave_under\ninterleave_probs: 1",
            {"data.shares": None},
            "mix_strategy: there is one data set",
        ),
        (
            "llamafactory",
            LF.format("sft") + "packing: true",
            {"data.packing": "bfd"},
            "#   data.packing: without neat_packing, attention crosses samples there",
        ),
        (
            "llamafactory",
            LF.format("dpo") + "lora_dropout: 0.1\npref_ftx: 0.5",
            {"adapter.dropout": 0.0, "stage.rpo_alpha": 0.5},
            "lora_dropout: the trainer of this stage turns dropout off",
        ),
        (
            "llamafactory",
            LF.format("dpo") + "pref_loss: simpo\npref_ftx: 0.5",
            {"stage.cpo_alpha": 0.5},
            "",
        ),
        (
            "llamafactory",
            LF.format("kto") + "pref_ftx: 0.5",
            {},
            "No equivalent here:\n#   pref_ftx=0.5: stage=kto has no such term",
        ),
        (
            "llamafactory",
            LF.format("sft") + "pissa_init: true",
            {"adapter.init_lora_weights": "pissa", "adapter.pissa_niter": 16},
            "",
        ),
        (
            "llamafactory",
            LF.format("sft") + "pissa_init: true\npissa_iter: -1",
            {"adapter.pissa_niter": None},
            "",
        ),
        (
            "llamafactory",
            LF.format("sft") + "pissa_init: true\npissa_iter: 0",
            {"adapter.pissa_niter": 0},
            "",
        ),
        (
            "llamafactory",
            LF.format("sft") + "template: llama3\nuse_unsloth_gc: true",
            {
                "parallelism.activation_offloading": True,
                "parallelism.activation_checkpointing": "full",
            },
            "add model.add_tokens=true adapter.modules_to_save=[embed_tokens,lm_head]",
        ),
        (
            "llamafactory",
            LF.format("sft") + "disable_gradient_checkpointing: true\nuse_unsloth_gc: true",
            {
                "parallelism.activation_offloading": False,
                "parallelism.activation_checkpointing": "none",
            },
            "use_unsloth_gc: disable_gradient_checkpointing turns it off",
        ),
        (
            "llamafactory",
            LF.format("sft") + "use_muon: true\nuse_unsloth: false\nuse_galore: true",
            {"optimizer._target_": "components.optimizers.Muon"},
            "No equivalent here:\n#   use_galore=True",
        ),
        ("llamafactory", LF.format("sft").replace("bf16: true\n", ""), {}, "run.dtype: LLaMA-Factory"),
        (
            "llamafactory",
            LF.format("sft") + "finetuning_type: full\npure_bf16: true\nmoe_aux_loss_coef: 0.01",
            {"model.moe.aux_loss": "switch", "model.moe.aux_loss_coef": 0.01, "run.dtype": "bf16"},
            "run.dtype: weights and the state of the optimizer are fp32 here",
        ),
        (
            "axolotl",
            f"{AX}datasets: [{{path: a.txt, type: completion}}]\nsample_packing: true",
            {"data.packing": "concat", "data.long_samples": "truncate"},
            "axolotl cuts a long document",
        ),
        (
            "axolotl",
            f"{AX}max_steps: 9\nsaves_per_epoch: 1\n"
            "pretraining_dataset: [{path: org/c4, name: en, text_column: body}]",
            {
                "data.train": "hub:org/c4",
                "data.streaming": True,
                "data.columns": {"text": "body"},
                "data.subset": "en",
                "checkpoint.save_every_epochs": 0,
            },
            "checkpoint.save_every: a stream has no epochs",
        ),
        (
            "axolotl",
            f"{AX}rl: kto\ndatasets: [{{path: a.jsonl, type: chatml.argilla}}]",
            {"data.strings": "chat", "data.columns": {"prompt": "instruction"}},
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}tokens: ['<x>']\npretrain_multipack_buffer_size: 10000\nlr_groups: [a]",
            {"model.add_tokens": ["<x>"], "data.buffer_size": None},
            "lr_groups=['a']: use optimizer.groups",
        ),
        (
            "axolotl",
            f"{AX}datasets: [{{path: org/ds, data_files: train.jsonl, type: alpaca}}]",
            {"data.train": "hub:org/ds"},
            "datasets: data_files=train.jsonl: all of its files are read",
        ),
        (
            "llamafactory",
            LF.format("kto") + "pref_loss: sigmoid",
            {"stage.loss": "kto"},
            "pref_loss: the loss of this stage does not read it there",
        ),
        (
            "llamafactory",
            LF.format("pt") + "enable_thinking: true\ntrain_on_prompt: true",
            {"data.chat_template_kwargs": None},
            "",
        ),
        (
            "llamafactory",
            LF.format("sft") + "template: alpaca\nenable_thinking: true",
            {"data.chat_template_kwargs": None},
            "enable_thinking: the template alpaca does not read it",
        ),
        (
            "llamafactory",
            LF.format("sft") + "template: qwen3\nenable_thinking: true",
            {"data.chat_template_kwargs": {"enable_thinking": True}},
            "data.chat_template_kwargs: leave it out if the template does not read enable_thinking",
        ),
        (
            "llamafactory",
            LF.format("sft") + "streaming: true\nval_size: 0.1\nsave_strategy: epoch\nbuffer_size: 9",
            {"data.eval_fraction": 0.1, "run.epochs": 3, "checkpoint.save_every_epochs": 1},
            "streaming=True: data=llamafactory does not read data.streaming",
        ),
        (
            "axolotl",
            f"{ALPACA}wandb_mode: disabled\nwandb_project: p\nuse_wandb: true",
            {"logger.wandb": None},
            "wandb_project: wandb_mode=disabled turns it off",
        ),
        (
            "axolotl",
            f"{ALPACA}warmup_steps: 0\nwarmup_ratio: 0.1",
            {"scheduler.warmup_steps": 0, "scheduler.warmup_ratio": 0.0},
            "warmup_ratio: warmup_steps takes precedence",
        ),
        (
            "axolotl",
            f"{ALPACA}wandb_project: 7\nwandb_entity: null\nrevision_of_model: 1e10\n"
            "tokens: [1_0, NaN, '[a]']",
            {
                "logger.wandb.project": "7",
                "model.revision": "1e10",
                "model.add_tokens": ["10", "NaN", "[a]"],
                "optimizer.lr": 1e-3,
            },
            "",
        ),
        (
            "axolotl",
            f"{AX}datasets: [{{path: org/a, name: 2024, split: 1e3, type: completion}}, {{path: b.txt}}]",
            {
                "data.sources": [
                    {"path": "hub:org/a", "format": "text", "split": "1e3", "subset": "2024"},
                    {"path": "b.txt"},
                ],
            },
            "",
        ),
        (
            "axolotl",
            f"{AX}datasets: [{{path: org/a, split: 2024, revision: '7', type: completion}}]",
            {"data.split": "2024", "data.revision": "7"},
            "",
        ),
        (
            "llamafactory",
            LF.format("dpo") + "packing: true\nmask_history: true\nlabel_smoothing_factor: 0.1",
            {"data.packing": "none", "stage.label_smoothing": 0.0},
            "packing: it is not read in this stage",
        ),
        (
            "axolotl",
            f"{AX}datasets: [{{path: a.txt, type: completion}}]\ntrain_on_inputs: true\n"
            "default_system_message: x",
            {"data.default_system": None, "data.train_on_prompt": False},
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]\n"
            "lr_scheduler: linear\ncosine_min_lr_ratio: 0.1\nuse_tensorboard: true\nwandb_project: p",
            {"adapter.target_modules": "all-linear", "logger.wandb.project": "p"},
            "'logger=[jsonl,console,wandb,tensorboard]'",
        ),
        (
            "axolotl",
            f"{AX}max_steps: 9\npretraining_dataset: [{{path: org/c4}}]\nval_set_size: 0.05",
            {"data.streaming": True, "data.eval_fraction": 0.0},
            "val_set_size=0.05: a stream has no data.eval_fraction",
        ),
        (
            "llamafactory",
            LF.format("sft") + "moe_aux_loss_coef: 0\nuse_eaft_loss: true",
            {"model.moe.aux_loss": "none"},
            "use_eaft_loss=True: the loss of every token",
        ),
        (
            "llamafactory",
            LF.format("sft")
            + "deepspeed: z3.json\nfp8: true\nfp8_enable_fsdp_float8_all_gather: true\npure_bf16: true",
            {"run.dtype": "fp8", "parallelism.fp8_recipe": "tensorwise", "parallelism.fp8_all_gather": True},
            "pure_bf16: run.dtype=fp8 has bf16 for everything else",
        ),
        (
            "llamafactory",
            LF.format("sft") + "optim: adafactor\nadam_epsilon: 1e-8\npissa_iter: 16",
            {"optimizer.eps": [None, 1e-3]},
            "pissa_iter: pissa_init is off",
        ),
        (
            "axolotl",
            f"{AX}rl: dpo\ndatasets: [{{path: a.jsonl, type: chatml.argilla}}]",
            {
                "data.strings": "chat",
                "data.columns": {
                    "prompt": "instruction",
                    "chosen": "chosen_response",
                    "rejected": "rejected_response",
                },
                "model.chat_template": "chatml",
            },
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}optimizer: muon",
            {"optimizer.adjust_lr": "original", "optimizer.betas": [0.9, 0.95]},
            "",
        ),
        ("axolotl", f"{ALPACA}optimizer: sgd", {"optimizer.momentum": 0.0}, ""),
        ("axolotl", f"{ALPACA}optimizer: adafactor", {}, "optimizer.lr: it is relative to the size"),
        (
            "axolotl",
            f"{ALPACA}optimizer: schedule_free_adamw\nwarmup_steps: 5\ncosine_min_lr_ratio: 0.1",
            {"scheduler._target_": "components.schedulers.Cosine", "optimizer.warmup_steps": 5},
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}lr_scheduler: warmup_stable_decay",
            {"scheduler.decay_style": "cosine"},
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}lr_scheduler: inverse_sqrt\nwarmup_steps: 0\nwarmup_ratio: 0",
            {},
            "without a warmup, the rate there falls",
        ),
        (
            "axolotl",
            f"{ALPACA}lr_scheduler: cosine_with_restarts\ngradient_checkpointing: offload",
            {
                "parallelism.activation_checkpointing": "full",
                "parallelism.activation_offloading": True,
            },
            "",
        ),
        (
            "axolotl",
            f"{ALPACA}zeta_quux: 3\ntokenizer_use_fast: true\nload_in_8bit: false",
            {},
            "zeta_quux=3: it is not a known option of axolotl",
        ),
        (
            "axolotl",
            f"{AX}rl: orpo\ndatasets: [{{path: a.jsonl, type: chat_template.default}}]",
            {},
            "the likelihood in TRL's ORPO is that of prompt and answer",
        ),
    ],
)
def test_what_means_something_else_there(
    imported: Run, tool: str, text: str, expected: dict[str, object], said: str
) -> None:
    answer = imported(tool, text)
    check(answer, expected)
    assert said in answer.out


def test_documents_beside_segments(imported: Run) -> None:
    """An instruction stage refuses documents, which axolotl trains on as a whole."""
    entries = "datasets: [{path: a.jsonl, type: completion}, {path: b.jsonl, type: input_output}]\n"
    assert "#   data.format: stage=sft does not train on documents" in imported("axolotl", AX + entries).out


def test_kernels_of_axolotl(imported: Run) -> None:
    plugins = "plugins: [a.LigerPlugin, a.CutCrossEntropyPlugin, a.Other]\n"
    data = "datasets: [{path: a.jsonl}]\n"
    answer = imported("axolotl", f"{AX}{data}{plugins}liger_rope: true\nliger_cross_entropy: true\n")
    check(answer, {"run.kernels": "liger"})
    missing, _, needless = answer.out.partition("# No equivalent here:")[2].partition("# Not needed:")
    assert [line.split(":")[1] for line in missing.splitlines() if line] == [" a.Other"]
    for name in ("plugins: LigerPlugin", "plugins: CutCrossEntropyPlugin", "liger_cross_entropy"):
        assert f"#   {name}: " in needless


def test_frozen_layers_of_llamafactory(imported: Run) -> None:
    """Layers are named here, not counted: the rest of the file is translated."""
    answer = imported("llamafactory", DEEPSPEED.format("sft").replace("full", "freeze") + FREEZE)
    check(answer, {"adapter._target_": "components.adapters.none"})
    missing = answer.out.partition("# No equivalent here:")[2]
    assert "finetuning_type=freeze: it counts layers" in missing
    assert "freeze_trainable_layers=2: use model.train_only (" in missing


def test_saved_adapters(imported: Run) -> None:
    """The reference is the model without the adapter, which decides what a new one would be given."""
    entry = "datasets: [{path: a.jsonl, type: llama3.icr}]\n"
    answer = imported("axolotl", f"{AX}rl: dpo\nadapter: lora\nlora_model_dir: x/y\n{entry}")
    expected = {"stage.reference=adapter_off", "data.columns={prompt: input}", "model.chat_template=llama3"}
    assert expected <= {*answer.words}
    text = LF.format("dpo") + "pissa_init: true\nadapter_name_or_path: saves/x\ndouble_quantization: false\n"
    several = imported("llamafactory", text.replace("saves/x", "saves/w, saves/x"))
    assert "adapter.path=saves/x" in several.words
    assert "#   adapter_name_or_path=saves/w: merge them with runner.export first" in several.out
    answer = imported("llamafactory", f"{text}ref_model: org/m\n")
    assert not [word for word in answer.words if word.startswith(("adapter.pissa", "stage.reference="))]
    assert "No equivalent here:\n#   double_quantization=False: use adapter.quantize" in answer.out


def test_reward_models_and_dropout_of_trl(imported: Run) -> None:
    """TRL leaves out pairs that are too long, and turns the dropout of adapters off for pairs."""
    text = "model_name_or_path: m\ndataset_name: a.jsonl\nuse_peft: true\n"
    answer = imported("trl", f"{text}lora_task_type: SEQ_CLS\n", "stage=rm")
    assert "#   lora_task_type: the stage decides the head" in answer.out
    check(answer, {"data.long_samples": "drop", "adapter.dropout": 0.0})
    check(imported("trl", f"{text}disable_dropout: false\n", "stage=dpo"), {"adapter.dropout": 0.05})
    check(imported("trl", text, "stage=sft"), {"adapter.dropout": 0.05})
    chunked = imported("trl", f"{text}loss_type: chunked_nll\nseed: 3\ndata_seed: 4\n", "stage=sft")
    assert "#   loss_type: it is the loss of stage=sft" in chunked.out
    assert "#   seed=3: run.seed, which data_seed sets" in chunked.out
    check(chunked, {"run.seed": 4})


def test_ranks_of_launchers(imported: Run, tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("num_processes: 8\nzero_stage: 3\n")
    line = "sft.py --model_name_or_path m --dataset_name a.jsonl --per_device_train_batch_size 1"
    for launcher in (
        "accelerate launch --config_file zero3.yaml",
        "deepspeed --num_nodes 2 --num_gpus 4",
        "accelerate launch --num_processes 8 --config_file other.yaml",
    ):
        answer = imported("trl", f"{launcher} {line}", suffix=".sh")
        check(answer, {"run.global_batch_size": 8})
        assert "ranks: it is not given" not in answer.out
    file = "model_name_or_path: m\ndataset_name: a.jsonl\nnum_processes: 4\naccelerate_config: zero3\n"
    check(imported("trl", file, "stage=sft"), {"run.global_batch_size": 32, "parallelism.dp": 4})


ZERO_2 = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "allgather_partitions": True}}
ZERO_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
OF_ACCELERATE = """
num_processes: 8
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: SHARD_GRAD_OP, fsdp_offload_params: true}
"""
SHARDING = ("reshard_after_forward", "cpu_offload", "dp_replicate")


@pytest.mark.parametrize(
    ("added", "file", "expected"),
    [
        ("deepspeed: z.json", json.dumps(ZERO_2), (False, False, 1)),
        ("deepspeed: z.json", json.dumps(ZERO_3), (True, True, 1)),
        ("deepspeed: z.json", '{"zero_optimization": {"stage": 0}}', (True, False, 8)),
        (f"deepspeed: {json.dumps(ZERO_2)}", None, (False, False, 1)),
        ("deepspeed: examples/ds_z2_offload_config.json", None, (False, True, 1)),
        ("deepspeed: examples/ds_z3_config.json", None, (True, False, 1)),
        ("fsdp: shard_grad_op auto_wrap offload", None, (False, True, 1)),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {offload_params: true}", None, (True, True, 1)),
        ("fsdp_config: z.json", OF_ACCELERATE, (False, True, 1)),
        ("fsdp_config: z.json", "deepspeed_config: {zero_stage: 1}", (False, False, 1)),
        ("fsdp: no_shard", None, (True, False, 8)),
        ("fsdp: hybrid_shard_zero2 auto_wrap", None, (False, False, 1)),
        ("fsdp_config: {fsdp_sharding_strategy: 5}", None, (False, False, 1)),
        ("fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", None, (True, False, 1)),
        ("fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_version: null}", None, (True, False, 1)),
        ("fsdp_config: {fsdp_sharding_strategy: SOME_SHARD}", None, (True, False, 1)),
    ],
)
def test_what_is_sharded(
    imported: Run, tmp_path: Path, added: str, file: str | None, expected: tuple[bool, bool, int]
) -> None:
    if file is not None:
        (tmp_path / "z.json").write_text(file)
    answer = imported("llamafactory", f"{LF.format('sft')}{added}\n", "ranks=8")
    check(answer, {f"parallelism.{key}": value for key, value in zip(SHARDING, expected, strict=True)})
    assert ("was not found" in answer.out) == ("examples" in added)
    assert ("hybrid shards need it" in answer.out) == bool(re.search("hybrid|5", added, re.IGNORECASE))
    assert ("some_shard is not a strategy here" in answer.out) == ("SOME" in added)


@pytest.mark.parametrize("tool", ["llamafactory", "trl"])
def test_every_option_of_the_trainer_is_known(tool: str) -> None:
    fields = dataclasses.fields(TrainingArguments)
    assert unknown(tool, {option.name for option in fields}) == set()


def test_the_stated_defaults_are_those_of_transformers() -> None:
    theirs = {option.name: option.default for option in dataclasses.fields(TrainingArguments)}
    stated = documents()[1]["common"]["defaults"]
    # No limit is 0 here, both tools turn gradient checkpointing on, and packing is an option of their own.
    others = {"save_total_limit", "gradient_checkpointing", "packing"}
    assert {name: theirs.get(name) for name in {*stated} - others} == {
        name: value for name, value in stated.items() if name not in others
    }


def test_every_option_of_trl_is_known_and_its_defaults_are_right() -> None:
    trl = pytest.importorskip("trl")
    configs = {name: getattr(trl, f"{name.upper()}Config") for name in ("sft", "dpo", "kto")}
    for stage, config in configs.items():
        fields = {option.name: option.default for option in dataclasses.fields(config)}
        assert unknown("trl", {*fields}) == set()
        tool = documents()[1]["trl"]
        stated = tool["defaults"] | tool["stage_defaults"].get(stage, {})
        for name in ("learning_rate", "logging_steps", "gradient_checkpointing", "num_train_epochs"):
            assert stated[name] == fields[name], (stage, name)
    assert unknown("trl", {option.name for option in dataclasses.fields(trl.ModelConfig)}) == set()
    assert unknown("trl", {option.name for option in dataclasses.fields(trl.ScriptArguments)}) == set()


@pytest.mark.parametrize(
    "text", ["a", r"\frac{1}{2}", r"ends with \\", r"a \' quote", "it's", r"\\\\x\n", "1, 2: {x}"]
)
def test_hydra_reads_a_text_as_it_was(text: str) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([f"x={hydra_value(text)}"])
    assert parsed.value() == text


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("", True),
        ("assistant_only_loss: false", True),
        ("completion_only_loss: true\nassistant_only_loss: false", False),
        ("assistant_only_loss: true\ncompletion_only_loss: false", False),
    ],
)
def test_only_answers_are_trained_unless_trl_trains_prompts(imported: Run, text: str, asks: bool) -> None:
    answer = imported("trl", f"model_name_or_path: x\ndataset_name: a.jsonl\n{text}\n", "stage=sft")
    command, _, remarks = answer.out.partition("#")
    assert "train_on_prompt" not in command
    assert ("TRL trains on every token of conversations" in remarks) == asks


def test_sources_of_axolotl_have_their_own_formats(imported: Run) -> None:
    chats = "{path: a.jsonl, ds_type: json, type: chat_template, field_messages: conv}"
    answer = imported("axolotl", f"base_model: x\ndatasets: [{chats}, {{path: b.jsonl, type: alpaca}}]\n")
    sources = [
        {"path": "a.jsonl", "format": "messages", "columns": {"messages": "conv"}},
        {"path": "b.jsonl", "format": "alpaca"},
    ]
    check(answer, {"data.sources": sources, "data.format": "auto", "data.columns": None})


def test_no_is_a_strategy(imported: Run) -> None:
    """YAML reads it as false."""
    command = "trl sft --model_name_or_path m/x --dataset_name trl-lib/Capybara --eval_strategy no"
    answer = imported("trl", f"{command} --packing no", suffix=".txt")
    assert "data.eval_split" not in answer.out
    check(answer, {"data.packing": "none"})
    file = "model_name_or_path: m/x\ndataset_name: trl-lib/Capybara\neval_strategy: no\n"
    assert "data.eval_split" not in imported("trl", file, "stage=sft").out


def test_numbers_of_options(imported: Run) -> None:
    text = "model_name_or_path: x\nstage: sft\ndataset: a\n"
    check(imported("llamafactory", f"{text}adam_beta1: 0.0\n"), {"optimizer.betas": [0.0, 0.999]})
    answer = imported("llamafactory", f"{text}learning_rate: auto\n")
    assert answer.code == MISTAKE
    assert "learning_rate: must be a number, got auto; correct it." in answer.err
    lora = "finetuning_type: lora\nlora_rank: abc\n"
    assert "lora_rank: must be a number, got abc" in imported("llamafactory", text + lora).err
    assert "val_size: must be a number, got inf" in imported("llamafactory", f"{text}val_size: .inf\n").err


def test_local_alpaca_data_of_axolotl(imported: Run) -> None:
    entry = "{path: a.jsonl, ds_type: json, type: alpaca, split: train}"
    answer = imported("axolotl", f"base_model: x\ndatasets: [{entry}]\n")
    check(answer, {"data.train": "a.jsonl", "data.format": "alpaca", "data.split": None})
    assert "for a record with an input, axolotl has another first paragraph" in answer.out
    other = imported("axolotl", f"base_model: x\ndatasets: [{entry}, {{path: b.jsonl, type: completion}}]\n")
    assert "axolotl writes '### Instruction:' before the turns" in other.out
    part = entry.replace("train}", '"train[:9]"}')
    answer = imported("axolotl", f"base_model: x\ndatasets: [{part}]\n")
    assert "datasets: split=train[:9]: only a data set of the hub has one" in answer.out


def test_another_metric_does_not_turn_the_loss_around(imported: Run) -> None:
    text = (
        "model_name_or_path: x\ndataset_name: a.jsonl\nlearning_rate: 1e-5\nearly_stopping_patience: 3\n"
        "load_best_model_at_end: true\nmetric_for_best_model: eval_f1\ngreater_is_better: true\n"
    )
    answer = imported("trl", text, "stage=sft")
    assert answer.code == 0
    words = answer.out.partition("#")[0].split()
    assert not [word for word in words if word.startswith(("checkpoint.keep_best", "early_stopping."))]
    assert "#   metric_for_best_model=eval_f1" in answer.out


def test_batches_and_evaluations_of_axolotl(imported: Run) -> None:
    text = (
        "base_model: x\nlearning_rate: 1e-3\nmicro_batch_size: 2\nbatch_size: 8\nval_set_size: 0.05\n"
        "datasets: [{path: a.jsonl, type: alpaca}]\nnum_epochs: 3\nsaves_per_epoch: 2\n"
    )
    answer = imported("axolotl", text, "ranks=4")
    check(
        answer, {"run.global_batch_size": 32, "run.eval_every_epochs": 1, "checkpoint.save_every": 0.166666}
    )


def test_prompts_of_alpaca(imported: Run) -> None:
    text = "base_model: x\nlearning_rate: 1e-3\ndatasets: [{path: a.jsonl, type: alpaca}]\n"
    answer = imported("axolotl", text)
    check(answer, {"model.chat_template": "plain"})
    assert "data.default_system='\"'\"'Below is an instruction that describes a task. Write" in answer.out
    text = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: alpaca\ndefault_system: Hello.\n"
    answer = imported("llamafactory", text)
    check(answer, {"model.chat_template": "plain", "data.default_system": "Hello."})
    assert "an empty line after an answer" in answer.out


def test_samples_and_seeds_of_llamafactory(imported: Run) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\nmax_samples: 10\nseed: 1\ndata_seed: 7\n"
    answer = imported("llamafactory", text)
    check(answer, {"data.max_samples": 10, "data.max_eval_samples": None, "run.seed": 7})
    check(imported("llamafactory", f"{text}val_size: 0.1\n"), {"data.max_eval_samples": 10})
    assert "#   seed=1: " in answer.out
