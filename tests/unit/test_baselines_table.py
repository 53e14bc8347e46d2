"""The table in the README equals the one made from the results."""

import json
from pathlib import Path

import pytest

from benchmarks.baselines.__main__ import RESULTS
from benchmarks.baselines.markdown import markdown

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_results() -> None:
    assert markdown(json.loads(RESULTS.read_text())) in README.read_text()


def row(program: str, speed: float | None) -> dict[str, object]:
    found = {} if speed is None else {"median": {"tokens_per_cpu_second": speed, "peak_mib": 1000.4}}
    return {"program": program, "note": None, **found}


@pytest.mark.parametrize("works", [("sft-fp32", "pt-fp32"), ("pt-fp32", "sft-fp32")])
def test_a_line_a_work_item_and_one_for_compiled_programs(works: tuple[str, str]) -> None:
    rows = {
        "sft-fp32": [row("ours", 700.4), row("trl", None), row("another", 1)],
        "pt-fp32": [row("ours", 600), row("ours, compiled", 650.6), row("litgpt, compiled", 640)],
    }
    head, _, *lines = markdown({name: {"rows": rows[name]} for name in works}).splitlines()
    assert head == "| work | this runner | TRL | litgpt |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["sft fp32", "700 (1000)", "", ""],
        ["pt fp32", "600 (1000)", "", ""],
        ["pt fp32, compiled", "651 (1000)", "", "640 (1000)"],
    ]
