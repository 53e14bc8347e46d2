"""Options of other tools, and what is said of them."""

import re
from pathlib import Path

import pytest
import yaml

from components.contracts.errors import ConfigError
from runner.config.unknown_keys import (
    check_long_options,
    counterpart,
    dictionary,
    documents,
    hint_for_value,
    page,
    unknown_key,
)
from runner.records.renamed_keys import RENAMED
from tests.e2e.commands import composed

ROOT = Path(__file__).parents[4]
WORDS = [(tool, word) for tool, options in dictionary().items() for word in options]


def keys(prefix: str, node: object) -> set[str]:
    """Return the dotted keys of ``node``, those of inner nodes too."""
    if not isinstance(node, dict):
        return {prefix}
    return {prefix}.union(*(keys(f"{prefix}.{name}".lstrip("."), value) for name, value in node.items()))


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Return every key of conf/: those of all options of a group together."""
    found = keys("", yaml.safe_load((ROOT / "conf/config.yaml").read_text()))
    for path in (ROOT / "conf").glob("*/*.yaml"):
        node = yaml.safe_load(path.read_text()) or {}
        found |= keys(path.parent.name, node)
        found |= keys(f"logger.{path.stem}", next(iter(node.values()), {}) if "logger" in path.parts else {})
    return found | {"run", "checkpoint"}


@pytest.mark.parametrize(("tool", "word"), WORDS, ids="-".join)
def test_what_an_option_is_here_exists(tool: str, word: str, known: set[str]) -> None:
    row = dictionary()[tool][word]
    ours, values = row.here, row.values or {}
    key, _, value = ours.partition("=")
    options = {path.stem for path in (ROOT / "conf" / key).glob("*.yaml")}
    if options:
        given = [value, *(ours for ours in values.values() if ours)]
        assert {name for word in given for name in word.strip("[]").split(",")} - {""} <= options
    elif not ours.startswith("python -m runner.report"):
        assert key in known


@pytest.mark.parametrize(("tool", "word"), WORDS, ids="-".join)
def test_an_option_on_the_command_line_is_answered_in_two_lines(
    tool: str, word: str, known: set[str]
) -> None:
    told = str(unknown_key(f"run.{word}", "the command line", known))
    assert len(told.splitlines()) <= 2
    answers = [rows[word].here for rows in dictionary().values() if word in rows]
    assert f"run.{word}" in RENAMED or any(answer in told for answer in answers)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("learning_rate", "use optimizer.lr for TRL and HF Trainer's learning_rate."),
        ("run.cutoff_len", "use data.max_length for LLaMA-Factory's cutoff_len."),
        ("--tensor-model-parallel-size", "use parallelism.tp for Megatron-LM's tensor_model_parallel_size."),
        ("sequence_len", "use data.max_length for axolotl's sequence_len."),
        ("optimizer.weight_decai", None),
        (
            "lora_target=all",
            "for LLaMA-Factory's lora_target=all, use adapter.target_modules=all-linear (or a list).",
        ),
        (
            "assistant_only_loss=True",
            "for TRL and HF Trainer's assistant_only_loss=True, use data.train_on_prompt=false "
            "(only the answers are trained by default).",
        ),
        ("loss_type=orpo", "for TRL and HF Trainer's loss_type=orpo, use stage=orpo."),
        ("rl=ipo", "for axolotl's rl=ipo, use stage=dpo stage.loss=ipo."),
        (
            "enable_thinking=true",
            "for LLaMA-Factory's enable_thinking=true, "
            "use 'data.chat_template_kwargs={enable_thinking: true}'.",
        ),
        ("train_on_inputs=false", "use data.train_on_prompt for axolotl's train_on_inputs."),
    ],
)
def test_a_word_of_another_tool_is_known(word: str, answer: str | None) -> None:
    name, _, value = word.partition("=")
    assert counterpart(name, value) == answer


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("do_train", "if another tool's option is meant: training is what the command does."),
        (
            "run.tf32",
            "if another tool's option is meant: matrix products of fp32 weights keep torch's own precision.",
        ),
        (
            "galore_rank",
            "if another tool's option is meant: use optimizer=adamw, or adapter=lora against memory.",
        ),
        ("run.log_evry", "did you mean 'run.log_every'?"),  # the pattern log_* would say less
        ("max_seq_len", "use data.max_length for TRL and HF Trainer's max_seq_length."),
        ("model.dtype", "did you mean 'run.dtype'?"),  # a reason of another tool says less
        ("optimizer.weight_decai", "did you mean 'optimizer.weight_decay'?"),
    ],
)
def test_an_option_that_is_not_needed_or_is_elsewhere(word: str, answer: str, known: set[str]) -> None:
    assert str(unknown_key(word, "the command line", known)).endswith(f"nothing reads this key; {answer}")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("data.cutoff_len", "use data.max_length for LLaMA-Factory's cutoff_len."),
        ("optimizer.weight_decai", "did you mean 'optimizer.weight_decay'?"),
        (
            "optimizer.of_another",
            "if another option of optimizer reads it, choose that one",
        ),
        ("optimzer.lr", "did you mean 'optimizer.lr'?"),
    ],
)
def test_a_key_of_an_experiment_may_be_of_another_option(word: str, answer: str, known: set[str]) -> None:
    assert answer in str(unknown_key(word, "conf/experiment/mine.yaml", known))


VALUES = [(key, value) for key, answers in documents()[2]["values"].items() for value in answers]


@pytest.mark.parametrize(("key", "value"), VALUES, ids=lambda word: str(word))
def test_what_a_value_is_here_can_be_composed(key: str, value: object) -> None:
    answer = hint_for_value(key, value)
    assert answer
    words = re.findall(r"[a-z_]+(?:\.[a-z_]+)*=\w+", answer)
    assert words
    for i, word in enumerate(words):
        group = [other for other in words[:i] if other.partition("=")[0] == word.partition(".")[0]]
        chosen = (
            {"stage": ["stage=dpo"], "adapter": ["adapter=lora"]} if "." in word.partition("=")[0] else {}
        )
        composed(["run.name=x", *chosen.get(word.partition(".")[0], []), *group, word])


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("data.packing", True, "use data.packing=bfd."),
        ("stage.loss", "orpo", "use stage=orpo."),
        ("scheduler", "warmup_stable_decay", "use scheduler=wsd."),
        ("parallelism", "tp4pp8", "use parallelism=megatron parallelism.tp=4 parallelism.pp=8."),
        ("parallelism", "fsdp2_tp4", "use parallelism=fsdp2 parallelism.tp=4."),
        ("parallelism", "tp4x", None),
        ("model", "tp4", None),
    ],
)
def test_a_value_of_another_tool_is_known(key: str, value: object, answer: str | None) -> None:
    assert hint_for_value(key, value) == answer


def test_there_are_enough() -> None:
    assert len({word for _, word in WORDS}) >= 240


def test_long_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lora_rank: options are KEY=VALUE.* use adapter.r "):
        check_long_options(["stage=sft", "--lora_rank=8"])
    for words in (["--quantization_bit=4"], ["--quantization_bit", "4"]):
        with pytest.raises(ConfigError, match="quantization_bit=4, use adapter=qlora "):
            check_long_options(words)
    check_long_options(["--cfg", "job", "--multirun", "optimizer.lr=1e-3"])


def test_a_long_list_of_keys_is_not_printed() -> None:
    known = [f"run.key_{number}" for number in range(200)]
    message = str(unknown_key("zzz", "the command line", known))
    assert len(message) < 200
    assert "--cfg job" in message
    assert "known: a, b" in str(unknown_key("zzz", "the command line", ["a", "b"]))


def test_the_page_is_made_of_the_dictionary() -> None:
    """If it fails: ``python -m runner.config.unknown_keys > docs/dictionary.md``."""
    assert (ROOT / "docs/dictionary.md").read_text().splitlines() == list(page())
