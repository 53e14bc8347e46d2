"""The comparison with other programs as a command: our runner, the loop, a third one, and skipped ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.__main__ import main
from benchmarks.baselines.programs import PEERS, Work, programs
from tests.peers import small_data

OTHER = """
import json, os, sys
steps = [{"ev": "train_begin", "t": 0.5, "cpu": 0.5}]
for i in range(int(sys.argv[2])):
    tokens = 100 + 100 * i
    numbers = {"tok": tokens, "lab": tokens // 2, "rss": 10 * i, "loss": 1.0}
    steps.append({"ev": "step", "t": 2.0 * i, "cpu": 1.0 + i} | numbers)
assert sys.argv[1] == "sft fp32"
open(os.environ["BENCH_OUT"], "w").write("".join(json.dumps(step) + chr(10) for step in steps))
"""
"""A program that reports 200 and 300 tokens in one processor second each."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the rows of the results by program, with only one run per program to save time."""
    folder = tmp_path_factory.mktemp("peers")
    small_data(folder)
    (folder / "other.py").write_text(OTHER)
    arguments = [
        f"--data={folder / 'source'}",
        f"--cache={folder}",
        f"--output={folder / 'baselines.json'}",
        "--work=sft-fp32",
        "--runs=1",
        "--steps=3",
        f"--peer=trl={folder}/nowhere/python",
        f"--other=mine={sys.executable} {folder}/other.py '{{stage}} {{dtype}}' {{steps}}",
        f"--other=broken={sys.executable} -c 'raise ValueError(4711)'",
    ]
    output = folder / "baselines.json"
    output.write_text('{"sft-fp32": "old", "pt-fp32": "kept"}')
    assert main(arguments) == 0
    works = json.loads(output.read_text())
    assert works["pt-fp32"] == "kept"
    facts = works["sft-fp32"]
    assert str(folder) not in facts["command"]
    assert facts["versions"]["ours"].keys() == {"torch", "transformers", "tokenizers"}
    return {row["program"]: row for row in facts["rows"]}


def test_ours_and_the_loop_train_the_same_samples(report: dict[str, dict[str, Any]]) -> None:
    ours, loop = report["ours"]["median"], report["loop"]["median"]
    assert ours["losses"] == pytest.approx(loop["losses"], rel=1e-5)
    assert len(set(loop["losses"])) == 3
    assert ours["labels_per_token"] == loop["labels_per_token"]
    assert ours["first_step_cpu_seconds"] > 1
    assert loop["flops_per_token"] > 0
    share = report["ours"]["shares"]
    speeds = ours["tokens_per_cpu_second"], loop["tokens_per_cpu_second"]
    assert share["of_loop"] == pytest.approx(speeds[0] / speeds[1])
    assert 0 < report["loop"]["shares"]["of_matmul"] < 1


def test_another_program_is_timed_by_its_events(report: dict[str, dict[str, Any]]) -> None:
    run = report["mine"]["median"]
    assert run["tokens_per_cpu_second"] == (200 + 300) / 2
    assert (run["labels_per_token"], run["peak_mib"]) == (0.5, 20)
    assert (run["first_step_seconds"], run["first_step_cpu_seconds"]) == (0, 1)


def test_what_did_not_run_says_why(report: dict[str, dict[str, Any]]) -> None:
    assert report["llamafactory"]["note"] == (
        "skipped: give --peer llamafactory=PYTHON, the Python in which it is installed"
    )
    assert report["trl"]["note"].startswith("skipped: there is no ")
    assert report["broken"]["note"] == "failed: 0 of 3 steps, exit 1: ValueError: 4711"


def test_a_python_without_the_peer_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    named = {program.name.split(",")[0] for program in PEERS}
    found = programs({name: str(bare) for name in named}, {})
    missing = {program.name: program.missing() for program in found}
    for program in PEERS:
        assert missing[program.name] == f"skipped: {program.packages[0]} is not installed in {bare}"
    assert missing["ours"] is None
    assert missing["loop"] is None


def test_shared_prompts_are_for_programs_that_can() -> None:
    shared = Work("dpo", "fp32", share_prompt=True)
    able = {program.name for program in programs({}, {"a": "x {shared}", "b": "x"}) if program.does(shared)}
    assert able == {"ours", "loop", "a"}
