"""A whole run: its files, and equal results however it is started."""

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.commands import (
    EXPORTING,
    SMALL,
    call_here,
    command,
    curve,
    newest,
    rows,
    run_command,
    run_forked,
    run_here,
    write_chats,
)

PEAK_FLOPS = 1e12
TRAIN_KEYS = {
    "step",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/num_tokens",
    "train/total_samples",
    "train/num_labels",
    "train/total_skipped",
    "train/seqlen_mean",
    "train/seqlen_max",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/mfu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with mock.patch("runner.training.assembly.peak_flops", return_value=PEAK_FLOPS):
        return run_here(
            tmp_path_factory.mktemp("run"), *EXPORTING, "run.eval_every=2", "checkpoint.save_every=2"
        )


def test_the_folder(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    assert facts["engine"] == "fsdp2"
    assert facts["world_size"] == 1
    assert facts["mesh"] == {"dims": {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, "ranks": [[[[0]]]]}
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["command"][0] == "runner"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["run"]["max_steps"] == 4
    assert config["run"]["name"] == run.parent.name == "sft_tiny"
    audit = json.loads((run / "audit.json").read_text())
    assert audit
    samples = json.loads((run / "samples.json").read_text())
    assert {trained for sample in samples for _, trained in sample} == {True, False}
    assert facts["mfu_peak"] == "the measured matmul peak"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000004",
    ]
    assert "step 4" in (run / "train.log").read_text()


def test_the_rows(run: Path) -> None:
    train = rows(run, "train/loss")
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    matrices = {
        name: value.numel()
        for name, value in load_file(run / "export" / "model.safetensors").items()
        if value.ndim == 2
    }
    head = matrices.pop("model.embed_tokens.weight")  # which is the head, too
    layers = sum(matrices.values())
    for row in train:
        assert row.keys() >= TRAIN_KEYS
        flops = row["perf/mfu"] * PEAK_FLOPS * row["perf/step_ms"] / 1000
        of_matrices = 6 * (layers * row["train/num_tokens"] + head * row["train/num_labels"])
        assert 1 < flops / of_matrices < 1.2, "the rest is attention"
        assert row["train/num_labels"] < row["train/num_tokens"] <= 4 * 128
    consumed = [row["train/total_samples"] for row in train]
    assert consumed == sorted(consumed)
    assert [row["step"] for row in rows(run, "eval/loss")] == [2, 4]
    assert all(math.isfinite(row["eval/loss"]) for row in rows(run, "eval/loss"))


def test_the_export_is_the_trained_model(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is os?"}], return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    assert model(ids).logits.shape[-1] == 8192
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 1_000 < sum(p.numel() for p in model.parameters()) < 1_000_000


def test_a_second_run_in_a_process_is_as_the_first(run: Path, tmp_path: Path) -> None:
    again = run_here(tmp_path, *SMALL, "run.eval_every=2", "checkpoint.save_every=2")
    assert curve(again) == curve(run)


def test_dpo(tmp_path: Path) -> None:
    train = rows(run_here(tmp_path, *SMALL, "stage=dpo"), "train/loss")
    assert all(math.isfinite(row["train/loss"]) for row in train)
    assert train[0]["train/loss"] == pytest.approx(math.log(2))
    assert {"train/rewards/margins", "train/rewards/accuracies"} <= train[0].keys()


@pytest.mark.parametrize(
    ("starter", "stage", "packing"),
    [
        ("own", "pt", "concat"),
        ("own", "dpo", "bfd"),
        ("torchrun", "sft", "none"),
    ],
)
def test_two_ranks_give_the_curve_of_one(tmp_path: Path, starter: str, stage: str, packing: str) -> None:
    write_chats(tmp_path / "chats.jsonl")
    data = ("data=files", f"data.train={tmp_path}/chats.jsonl") if starter == "torchrun" else ()
    same = (
        *SMALL,
        *data,
        f"stage={stage}",
        f"data.packing={packing}",
        "run.export=false",
        "optimizer.lr=1e-4",
    )
    single = run_here(tmp_path / "one", *same, "run.micro_batch_size=2")
    two = [*same, "parallelism=fsdp2", "parallelism.dp=2", f"run.output_dir={tmp_path / 'two'}"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    if starter == "own":
        answer = run_forked(*two, cwd=tmp_path)
    else:
        answer = run_command([command()[0], *launcher, *command(*two)[1:]], cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    runs = list((tmp_path / "two").glob("*/*/run.json"))
    assert len(runs) == 1
    assert json.loads(runs[0].read_text())["mesh"]["ranks"] == [[[[0]], [[1]]]]
    for ours, theirs in zip(curve(runs[0].parent), curve(single), strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_zero_turns_every_cadence_off(tmp_path: Path) -> None:
    off = (
        "run.log_every=0",
        "run.eval_every=0",
        "checkpoint.save_every=0",
        "run.final_sample_tokens=0",
        "run.export=false",
    )
    run = run_here(tmp_path, *SMALL, *off)
    assert rows(run, "train/loss") == []
    assert not (run / "export").exists()


def test_epochs(tmp_path: Path) -> None:
    chats = [{"instruction": f"say {word}", "output": word * 3} for word in "abcdefghij"]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(chats))
    data = ("data=files", f"data.train={path}", "data.packing=none", f"data.eval={path}")
    small = [override for override in SMALL if not override.startswith("run.max_steps")]
    length = ("run.epochs=2", "checkpoint.save_every_epochs=1", "checkpoint.keep_last=0")
    evaluations = ("run.eval_every_epochs=1", "run.eval_at_end=false")
    run = run_here(tmp_path / "o", *small, *data, *length, *evaluations)
    # Ten samples in batches of four leave two for the third batch of an epoch.
    assert [row["step"] for row in rows(run, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [row["train/total_samples"] for row in rows(run, "train/loss")] == [4, 8, 10, 14, 18, 20]
    saved = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert saved == ["step_00000003", "step_00000006"]
    assert [row["step"] for row in rows(run, "eval/loss")] == [3, 6]


def test_max_steps_wins_over_epochs_and_zeros_are_reported_where_asked(tmp_path: Path) -> None:
    untied = "model.architecture.tie_word_embeddings=false"
    run = run_here(tmp_path, *SMALL, untied, "run.epochs=1", "run.log_num_zeros=true")
    assert [row["step"] for row in rows(run, "train/loss")] == [1, 2, 3, 4]
    # Embeddings of tokens that do not occur have zero gradients.
    assert all(row["train/num_zeros_in_grad"] > 0 for row in rows(run, "train/loss"))


def test_skipped_steps_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = call_here(
        f"run.output_dir={tmp_path}",
        *SMALL,
        "optimizer.lr=1e30",
        "optimizer.max_grad_norm=null",
        "run.max_steps=20",
        "run.max_consecutive_skips=3",
    )
    assert code == 1
    assert "run.max_consecutive_skips" in capsys.readouterr().err
    last = rows(newest(tmp_path), "train/loss")[-1]
    assert last["train/total_skipped"] == 3
    assert last["train/grad_norm"] is None
