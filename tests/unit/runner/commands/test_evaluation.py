import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from components.contracts.errors import ConfigError
from runner.commands.arguments import parse_pairs
from runner.commands.chat import chat
from runner.commands.evaluate import evaluation
from runner.config.sources import name_of
from runner.launch.checks import READ_BY_STEPS
from runner.launch.prepare import with_absolute_paths
from runner.records.renamed_keys import RENAMED
from runner.records.run_dir import write_config
from runner.records.run_record import RunRecord


def test_a_file_replaces_the_data_sets_of_a_run(tmp_path: Path) -> None:
    """Its folder is not that of the trained runs, whose newest it would be."""
    run = tmp_path / "lora" / "2026-01-01_00-00-00"
    overrides = ["stage=sft", "data=llamafactory", "data.dataset_info=d", "data.dataset=a", "run.name=lora"]
    run.mkdir(parents=True)
    mixture = ["data.shares=[1]", "data.stopping_strategy=all_exhausted"]
    RunRecord(overrides=[*overrides, *mixture]).write(run)
    words = evaluation([f"checkpoint={run}", "data.eval=x.jsonl"])
    assert {"stage=sft", "data=files", "data.train=x.jsonl", "run.name=evaluate_lora"} <= {*words}
    unread = ("data.dataset", "data.shares", "data=llamafactory", "run.name=lora")
    assert not any(word.startswith(unread) for word in words)
    words = evaluation([f"checkpoint={run}", "data.eval_dataset=b"])
    assert {"data.dataset=b", "data.shares=null", "data.stopping_strategy=first_exhausted"} <= {*words}
    words = evaluation([f"checkpoint={run}", "data=llamafactory", "data.dataset_info=d", "data.dataset=b"])
    assert not any(word.startswith(("data.shares", "data.stopping_strategy")) for word in words)


def test_options_of_the_training_data_are_not_taken_over(tmp_path: Path) -> None:
    mixture = ["data=files", "data.sources=0.7 a 0.3 b", "data.stopping_strategy=all_exhausted"]
    of_hub = ["data.split=train", "data.eval_split=test"]
    RunRecord(overrides=[*mixture, *of_hub, "data.drop_last=true"]).write(tmp_path)
    words = [f"checkpoint={tmp_path}", "data.eval=x.jsonl"]
    expected = ["data.stopping_strategy=first_exhausted", "data.drop_last=false", "data.eval_split=null"]
    assert {*expected, "data.split=null"} <= {*evaluation(words)}
    assert "data.subset=null" not in evaluation(words)
    hub = evaluation([f"checkpoint={tmp_path}", "data.eval=hub:x", "data.eval_split=dev"])
    assert "data.stopping_strategy=first_exhausted" in hub
    assert not {"data.split=null", "data.eval_split=null"} & {*hub}


def test_options_that_only_steps_read_are_not_taken_over(tmp_path: Path) -> None:
    """``run.evaluate_only`` refuses them if they are typed."""
    RunRecord(overrides=[f"{name}=1" for name in READ_BY_STEPS]).write(tmp_path)
    assert not {*READ_BY_STEPS} & {name_of(word) for word in evaluation([f"checkpoint={tmp_path}"])}


def test_a_run_is_evaluated_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config has the absolute path of a local model; a model of the hub keeps its name."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"model": {"path": "base", "tokenizer": "of/hub"}, "adapter": None, "stage": {}, "run": {}}
    config = with_absolute_paths(given)
    assert config == {**given, "model": {"path": str(tmp_path / "base"), "tokenizer": "of/hub"}}
    write_config(tmp_path, config | {"adapter": {}, "checkpoint": {}})
    RunRecord(overrides=["model=hf", "model.path=base", "model.tokenizer=of/hub"]).write(tmp_path)
    words = [word for word in evaluation([f"checkpoint={tmp_path}"]) if word.startswith("model.")]
    assert words[-2:] == [f"model.path={tmp_path}/base", "model.tokenizer=of/hub"]


def test_an_evaluation_begins_as_the_run_did(tmp_path: Path) -> None:
    """The override may name a folder of runs, of which another one is the newest now."""
    begun = tmp_path / "base" / "step_4"
    begun.mkdir(parents=True)
    RunRecord(overrides=["checkpoint.init_from=outputs/base", "hook=ema"]).write(tmp_path)
    config = {"run": {}, "model": {}, "adapter": {}, "checkpoint": {"init_from": str(begun)}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    words = evaluation([f"checkpoint={tmp_path}"])
    assert f"checkpoint.init_from={begun}" in words
    assert "checkpoint.init_from=outputs/base" not in words
    assert "hook=ema" not in words
    begun.rmdir()
    assert "checkpoint.init_from=null" in evaluation([f"checkpoint={tmp_path}"])


def test_jobs_of_a_sweep_read_their_own_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = evaluation(["-m", f"checkpoint={tmp_path}", "data.eval=a.jsonl,b.jsonl"])
    assert {"-m", "data.eval=a.jsonl,b.jsonl", "data.train=${data.eval}", "data=files"} <= {*words}
    with pytest.raises(ConfigError, match=r"data\.eval: a sweep varies one set per job; give paths"):
        evaluation(["-m", f"checkpoint={tmp_path}", "data.eval={a: x},{a: y}"])


@pytest.mark.parametrize(("kind", "replaced"), [("components.data.StdlibData", True), ("mine.Data", False)])
def test_an_experiment_that_selects_no_data(tmp_path: Path, kind: str, replaced: bool) -> None:
    RunRecord(overrides=["experiment=pretrain_wsd"]).write(tmp_path)
    config: dict[str, object] = {group: {} for group in ("run", "model", "adapter", "checkpoint")}
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"data": {"_target_": kind}}))
    assert ("data=files" in evaluation([f"checkpoint={tmp_path}", "data.eval=a.txt"])) is replaced


def test_keys_of_options_that_are_not_chosen_any_more(tmp_path: Path) -> None:
    before = ["logger=[wandb]", "logger.wandb.mode=offline", "data=files", "data.columns={text: a}"]
    RunRecord(overrides=before).write(tmp_path)
    words = evaluation([f"checkpoint={tmp_path}", "logger=[jsonl]", "data=demo"])
    assert {"logger=[jsonl]", "data=demo"} <= {*words}
    assert not any(word.startswith(("logger.", "data.")) for word in words)
    words = evaluation([f"checkpoint={tmp_path}", "logger=[jsonl,wandb]", "data=files", "data.eval=b.jsonl"])
    assert {"logger.wandb.mode=offline", "data.columns={text: a}"} <= {*words}
    assert not any(
        word.startswith("data.columns") for word in evaluation([f"checkpoint={tmp_path}", "data=mine"])
    )


def test_a_path_without_its_key(tmp_path: Path) -> None:
    remedy = f"is not KEY=VALUE[:;] use checkpoint={tmp_path}"
    with pytest.raises(ConfigError, match=remedy):
        evaluation([str(tmp_path)])
    with pytest.raises(ConfigError, match=remedy):
        parse_pairs([str(tmp_path)], {"checkpoint": None})


def test_another_layout_has_its_own_sizes(tmp_path: Path) -> None:
    sizes = ["parallelism.tp=2", "parallelism.sequence_parallel=true"]
    RunRecord(overrides=["parallelism=megatron", *sizes]).write(tmp_path)
    words = evaluation([f"checkpoint={tmp_path}", "parallelism=fsdp2", "parallelism.dp=2"])
    assert [word for word in words if "parallelism" in word] == ["parallelism=fsdp2", "parallelism.dp=2"]
    assert {*sizes} <= {*evaluation([f"checkpoint={tmp_path}", "parallelism.dp=2"])}


def test_every_path_is_one_override(tmp_path: Path) -> None:
    """Names that Hydra would read otherwise are quoted."""
    run = tmp_path / "lr=1, für (alle)" / "stamp"
    run.mkdir(parents=True)
    RunRecord().write(run)
    words = evaluation([f"checkpoint={run}", "data.eval=x.jsonl"])
    parsed = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(words)}
    assert parsed["checkpoint.resume"] == str(run)
    assert parsed["run.name"] == "evaluate_lr=1, für (alle)"
    export = run / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    words = evaluation([f"checkpoint={export}", "data.eval='a, it\\'s.jsonl'"])
    parsed = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(words)}
    assert (parsed["model.path"], parsed["data.train"]) == (str(export), "a, it's.jsonl")
    (export / "adapter_config.json").write_text('{"base_model_name_or_path": "/m/lr=1"}')
    words = evaluation([f"checkpoint={export}", "data=demo"])
    parsed = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(words)}
    assert (parsed["model.path"], parsed["adapter.path"]) == ("/m/lr=1", str(export))


def test_a_job_of_a_sweep_keeps_what_the_file_of_the_sweep_sets(tmp_path: Path) -> None:
    own = ["sweep=mine", "optimizer.lr=1e-3"]
    RunRecord(overrides=["--config-dir=conf", *own], command=["runner", "--config-dir=conf"]).write(tmp_path)
    words = evaluation([f"checkpoint={tmp_path}"])
    assert {*own, "hydra.mode=RUN"} <= {*words}
    assert not [word for word in words if word.startswith("-")]  # a folder may not name another one to read
    theirs = evaluation([f"checkpoint={tmp_path}", "--config-dir", "own", "data.eval=x", "-m"])
    assert theirs[:2] == ["--config-dir=own", "-m"]


def test_the_keys_of_an_older_run_have_other_names(tmp_path: Path) -> None:
    RunRecord(overrides=["run.save_every=100", "+data.overlong=drop"]).write(tmp_path)
    words = evaluation([f"checkpoint={tmp_path}"])
    assert not [word for word in words if "save_every" in word]  # an evaluation saves nothing
    assert f"+{RENAMED['data.overlong']}=drop" in words


def test_an_adapter_brings_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    arguments = [f"checkpoint={tmp_path}", "data.eval=x.jsonl"]
    assert not [word for word in evaluation(arguments) if word.startswith("model.tokenizer")]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert f"model.tokenizer={tmp_path}" in evaluation(arguments)
    assert "model.tokenizer=other" in evaluation([*arguments, "model.tokenizer=other"])


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_trust_has_no_meaning_for_an_exported_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    arguments = [f"checkpoint={tmp_path}", "trust=[x]"]
    for command in (evaluation, chat):
        with pytest.raises(ConfigError, match=r"^trust: is not read with an exported folder"):
            command([*arguments, "data.eval=x.jsonl"] if command is evaluation else arguments)


@pytest.mark.parametrize(
    ("word", "consent"),
    [
        ("data._target_=my_records.Tickets", "trust=[my_records]"),
        ("+logger.own._target_='my_records.Log'", "trust=my_records"),
        ('stage={"_target_": my_records.Loss}', "trust=[other,my_records]"),
        ("model.trust_remote_code=true", "model.trust_remote_code=true"),
        ("experiment=../../evil", "experiment=../../evil"),
        ("+experiment@model=[/tmp/evil]", "+experiment@model=[/tmp/evil]"),
        ("stage=${oc.env:EVIL}", "stage=${oc.env:EVIL}"),
        ("logger.jsonl._target_=components${oc.select:none,_evil.Log}", "logger.jsonl._target_=my.Log"),
        ("logger.jsonl._target_=components.loggers.Jsonl,evil.Log", "logger.jsonl._target_=my.Log"),
        ("+logger.own='${oc.decode:\"{_tar${oc.select:none,get_}: evil.Log}\"}'", "+logger.own={}"),
        ("stage={},/tmp/evil", "stage=sft"),
    ],
)
def test_code_that_a_run_names_needs_consent(tmp_path: Path, word: str, consent: str) -> None:
    RunRecord(overrides=["data._target_=components.data.StdlibData", word]).write(tmp_path)
    arguments = [f"checkpoint={tmp_path}", "data.eval=x.jsonl"]
    with pytest.raises(ConfigError, match=r"\(run.json\): .* give "):
        evaluation(arguments)
    given = consent if name_of(consent) == name_of(word) else word
    assert given in evaluation([*arguments, consent])
