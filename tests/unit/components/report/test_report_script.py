"""The report page's own scripts in node, without a browser: what the table, the axes and the plots get."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.report import Entry, write_page
from tests.unit.components.report.test_report import HOSTILE, finished

SCRIPT = Path(__file__).parent / "report_parts.js"
MEASURED = "the measured matmul peak"


def opened(page: Path) -> dict[str, Any]:
    """Return what the page shows and what it does, observed by report_parts.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    answer = subprocess.run([node, SCRIPT, page], capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the observations of a watched page of three next-token runs and one of kto."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        finished(folder / str(lr), lr=lr, overrides=[f"optimizer.lr={lr}"], mfu_peak=MEASURED)
        for lr in (0.01, 0.5, 1.0)
    ]
    kto = finished(folder / "kto", lr=4.0, loss="KTO", overrides=["optimizer.lr=4.0", "stage=kto"])
    with (runs[2] / "metrics.jsonl").open("a") as file:  # another pace: 25 tokens and 2 s each
        for step in (4, 5):
            row = {"train/loss": 1.0, "train/total_tokens": 150 + 25 * (step - 3), "perf/step_ms": 2000.0}
            file.write(json.dumps({"step": step} | row) + "\n")
    page = folder / "page.html"
    write_page("t", [Entry(number, run) for number, run in enumerate([*runs, kto])], page, refresh=5.0)
    return opened(page)


def test_the_table_ranks_each_group_by_itself(found: dict[str, Any]) -> None:
    assert found["order"] == [2, 1, 0, 3]  # kto's loss of 1 is the lowest of all
    texts = [[text for _, text in row] for row in found["table"]]
    assert [row[0] for row in texts if len(row) == 1] == [
        "NextToken: eval/loss on held out, 2 samples, 20 targets",
        "KTO: eval/loss on held out, 2 samples, 20 targets",
    ]
    best = [text for row in found["table"] for name, text in row if name.endswith("best")]
    assert best == ["4.0000"]  # the group of kto has one run
    assert [tile.startswith("best loss") for tile in found["tiles"]].count(True) == 2


def test_the_table_has_names_and_aligned_numbers(found: dict[str, Any]) -> None:
    (best,) = [row for row in found["table"] if any(name.endswith("best") for name, _ in row)]
    assert best[1] == ["", "tuned · lr=1.0"]
    assert ["right", "1.0"] in best
    assert ["right", "1.0000"] in best
    assert found["names"] == ["tuned · lr=0.01", "tuned · lr=0.5", "tuned · lr=1.0", "tuned · lr=4.0 · kto"]
    assert found["fixed"] == ["0.5000", "12.3457", "1,234.5000", "0.0000", "1e-7", ""]
    assert found["durations"] == ["1.3 s", "59 s", "1 min 0 s", "2 min 0 s", "1 h 0 min"]


def test_curves_are_drawn_along_steps_tokens_or_seconds(found: dict[str, Any]) -> None:
    assert found["chosen_axes"] == ["step", "tokens", "seconds"]
    steps, tokens, seconds = (found["places"][axis] for axis in found["chosen_axes"])
    assert steps == [[1, 2, 3]] * 2 + [[1, 2, 3, 4, 5], [1, 2, 3]]
    assert tokens == [[50, 100, 150]] * 2 + [[50, 100, 150, 175, 200], [50, 100, 150]]
    assert seconds == [[0.5, 1, 1.5]] * 2 + [[0.5, 1, 1.5, 3.5, 5.5], [0.5, 1, 1.5]]
    assert found["tokens"] == [[150]] * 4  # evaluations have no count of tokens of their own
    assert found["seconds"] == [[1.5]] * 4


def test_hyperparameters_lead_to_the_final_metric(found: dict[str, Any]) -> None:
    assert not found["parallel"]["hidden"]
    values = [["0.01", "0.5", "1.0"], [4.99, 4.5, 4.0]]
    expected = [["optimizer.lr", values[0]], ["loss", values[1]]]
    assert found["parallel"]["plots"] == [{"runs": [0, 1, 2], "axes": expected}]
    assert found["other_metric"] == [["train/loss", [8.97, 7.5, 1.0]]]
    heights = {run: [float(point.split(",")[1]) for point in line.split()] for run, line in found["lines"]}
    (lowest, highest), middle = heights["0"], heights["1"][0]  # in pixels from the top
    assert heights["2"] == [highest, lowest]
    assert middle - highest < (lowest - highest) / 5  # the axis of learning rates is logarithmic


def test_the_trained_tokens_of_samples_are_marked(found: dict[str, Any]) -> None:
    assert found["marked"] == [f"A {HOSTILE}"]
    assert "What is it?A " in found["shown"]


def test_the_last_completions_are_shown(found: dict[str, Any]) -> None:
    expected = f"completions/step_00000003.jsonlpromptcompletionidSay it{HOSTILE} at 33"
    assert expected in found["shown"]
    assert f"{HOSTILE} at 2" not in found["shown"]


def test_the_mfu_is_shown_with_its_peak(found: dict[str, Any]) -> None:
    assert [chart for chart in found["charts"] if "mfu" in chart] == [f"perf/mfu of {MEASURED}log"]
    assert [tile for tile in found["tiles"] if tile.startswith("MFU")] == [
        f"MFU0.25of {MEASURED}, the most of any run"
    ]


def test_a_watched_page_reloads_itself_and_keeps_the_choices(found: dict[str, Any]) -> None:
    assert found["reload_ms"] == [5000]
    expected = {"reloads": 1, "axis": "seconds", "selected": [2, 1, 3]}
    looks = {"logs": [False, True, False, False], "extremes": False, "theme": "dark"}
    assert found["restored"] == expected | looks


def test_a_page_of_one_run_opens_and_does_not_reload(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", lr=1.0)
    rows = [{"component": "masters", "bytes": 512, "estimated_bytes": 1024}]
    (run / "preflight.json").write_text(json.dumps({"memory_components": rows}))
    write_page("t", [Entry(0, run)], tmp_path / "page.html")
    found = opened(tmp_path / "page.html")
    assert found["reload_ms"] == []
    assert found["parallel"] == {"hidden": True, "plots": []}
    for words in ("memory components", "masters", "512", "1,024"):
        assert words in found["shown"]
