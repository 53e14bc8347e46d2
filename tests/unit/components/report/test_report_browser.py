"""The report page works in a browser, and node parses its scripts; each is skipped if it is missing."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.commands.report import report
from tests.unit.components.report.test_report import a_sweep

SCRIPTS = Path(__file__).parents[4] / "components" / "report"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
    "--window-size=1400,900",
]
WATCH = """<script>
window.wrong = [];
window.onerror = (words) => { window.wrong.push(words); };
window.requestAnimationFrame = (draw) => setTimeout(draw, 1);  // a headless browser may never paint
</script>"""
TRY = f"<script>{(Path(__file__).parent / 'report_clicks.js').read_text()}</script>"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the observations of a script that clicks everything on the page."""
    if CHROMIUM is None:
        pytest.skip("no chromium here; apt-get install chromium")
    folder = tmp_path_factory.mktemp("report")
    sweep = a_sweep(folder)
    report([str(sweep)])
    page = (sweep / "report.html").read_text()
    (folder / "tried.html").write_text(
        page.replace("<body>", f"<body>{WATCH}").replace("</body>", f"{TRY}</body>")
    )
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        f"file://{folder}/tried.html",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    shown = re.search(r"found (\{.*\}) end</pre>", answer.stdout.rpartition('id="found"')[2], re.DOTALL)
    assert shown is not None, answer.stderr
    result: dict[str, Any] = json.loads(html.unescape(shown[1]))
    assert "thrown" not in result, result
    return result


def test_no_script_fails(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert not found["wide"]


def test_every_chart_is_drawn(found: dict[str, Any]) -> None:
    assert found["inked"] == [True, True, True]


def test_columns_sort(found: dict[str, Any]) -> None:
    assert found["by_loss"] == [1, 0, 3, 2, 4]  # run 3 has unknown data; runs without a loss come last
    assert found["by_lr"] == [0, 1, 3, 2, 4]
    assert found["by_lr_down"] == [1, 0, 3, 4, 2]


def test_rows_select_and_filter(found: dict[str, Any]) -> None:
    assert found["selected"] == [0, 1]  # the failed run is not drawn at first
    assert found["without_one"] == found["drawn"] == [0]
    assert found["filtered"] == [2]
    assert found["best"] == [0, 1]  # completed runs only


def test_the_mouse_shows_values_and_zooms(found: dict[str, Any]) -> None:
    assert found["tip"].startswith("step 1")
    assert "lr=0" in found["tip"]
    low, high = found["zoomed"]
    assert 1 < low < high < 3
    assert found["scales"] == [[low, high]] * 3


def test_another_axis_and_the_hyperparameters_are_drawn(found: dict[str, Any]) -> None:
    assert found["tokens"] == [150, 151, 150]  # a single point is drawn between its neighbours
    assert found["lines"] == 2


def test_the_mouse_is_seen_in_every_chart(found: dict[str, Any]) -> None:
    assert found["marked_elsewhere"]
    assert found["highlighted"] == [True, True, True]


def test_logarithms(found: dict[str, Any]) -> None:
    logarithmic = 3  # uPlot's constant for a logarithmic scale
    assert found["scales_of_y"] == [logarithmic] * 3
    assert found["without_logarithms"]  # the axes are still drawn


def test_the_words_of_a_run_are_shown(found: dict[str, Any]) -> None:
    assert "onerror=alert" in found["wrong_things"]  # shown as text
    assert "ValueError: 4711" in found["wrong_things"]
    assert "weights" in found["details"][1]
    assert "no metrics.jsonl" in found["details"][4]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.js")), ids=lambda path: path.name)
def test_node_reads_the_script(path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    answer = subprocess.run([node, "--check", str(path)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here; apt-get install nodejs")
def test_different_integers_of_a_config_look_different() -> None:
    shown = "[1000000, 1000001, 20000, 0.25, 1e-5, null].map(setting).join(' ')"
    script = f"{(SCRIPTS / 'tables.js').read_text()}\nconsole.log({shown})"
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["1000000", "1000001", "20000", "0.25", "1e-5", "–"]
