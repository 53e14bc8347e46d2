"""All data files of LLaMA-Factory, described by its own dataset_info.json, train or are refused by name.

Set LLAMAFACTORY_DATA to the folder ``data`` of a checkout of it.
"""

import json
import math
import os
from pathlib import Path

import pytest

from components.contracts.errors import MISTAKE
from tests.e2e.commands import SMALL, call_here, rows, run_here

DATA = Path(os.environ.get("LLAMAFACTORY_DATA", ""))
DESCRIBED = {
    "identity": "sft",
    "alpaca_en_demo": "sft",
    "alpaca_zh_demo": "sft",
    "glaive_toolcall_en_demo": "sft",
    "glaive_toolcall_zh_demo": "sft",
    "dpo_en_demo": "dpo",
    "dpo_zh_demo": "dpo",
    "kto_en_demo": "kto",
    "wiki_demo": "pt",
    "c4_demo": "pt",
}
"""The stage of each data set of text in dataset_info.json that is a file."""
NOT_TEXT = {
    "mllm_demo": "images",
    "mllm_audio_demo": "audios",
    "mllm_video_demo": "videos",
    "mllm_video_audio_demo": "videos",
}
"""The field for which each other one is refused."""
ALONE = {"v1_sft_demo": "sft", "v1_dpo_demo": "dpo", "reason_tool_use_demo_50": "sft"}
"""The stage of each file of text that dataset_info.json does not describe."""
RUN = (*SMALL, "data.max_length=512", "run.max_steps=2")

pytestmark = pytest.mark.skipif(
    not (DATA / "dataset_info.json").is_file(), reason="LLAMAFACTORY_DATA is not the folder of its data files"
)


def described(name: str) -> tuple[str, ...]:
    return ("data=llamafactory", f"data.dataset_info={DATA}", f"data.dataset={name}")


def alone(name: str) -> tuple[str, ...]:
    return ("data=files", f"data.train={DATA / name}.jsonl")


def check_trains(folder: Path, stage: str, *data: str) -> None:
    run = run_here(folder, f"stage={stage}", *data, *RUN)
    losses = [row["train/loss"] for row in rows(run, "train/loss")]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def test_every_file_is_named_here() -> None:
    entries = json.loads((DATA / "dataset_info.json").read_text())
    assert {name for name, entry in entries.items() if "file_name" in entry} == {*DESCRIBED, *NOT_TEXT}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_file_trains(name: str, tmp_path: Path) -> None:
    check_trains(tmp_path, DESCRIBED[name], *described(name))


@pytest.mark.parametrize("name", ALONE)
def test_a_file_trains(name: str, tmp_path: Path) -> None:
    check_trains(tmp_path, ALONE[name], *alone(name))


@pytest.mark.parametrize(("name", "field"), [*NOT_TEXT.items(), ("v1_multimodal_demo", "image_url")])
def test_what_is_not_text_is_refused(
    name: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = alone(name) if name.startswith("v1_") else described(name)
    assert call_here(f"run.output_dir={tmp_path}", "stage=sft", *data, *RUN) == MISTAKE
    assert f"set data.ignore_fields=[{field}]" in capsys.readouterr().err
