"""Writing the data of runs into one self-contained HTML file."""

import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path

from components.atomic_write import write_atomic
from components.contracts.json_types import Config, Json
from components.report.curves import SECONDS
from components.report.runs import Entry, RunPage, fact_tables, read_run

ASSETS = Path(__file__).parent
FIRST_CHARTS = (
    "train/loss",
    "eval/loss",
    "train/grad_norm",
    "train/lr",
    "perf/tokens_per_s",
    "perf/peak_memory_gib",
    "perf/rss_gib",
)
COUNTERS = {
    "train/num_tokens",
    "train/num_labels",
    "train/total_tokens",
    "train/total_samples",
    "train/epoch",
    "train/seqlen_mean",
    "train/seqlen_max",
    "perf/step_ms",
    SECONDS,
}
"""Metrics without a chart."""
AXES = {"tokens": "train/total_tokens", "seconds": SECONDS}
"""Axis of the curves, besides the steps -> the metric that gives the position of a step on that axis."""
NOT_TRAINED = {"run.name", "run.output_dir"}
"""Overrides that do not change the training."""
MOST_WORDS = 3
"""Maximum number of overrides in the name of a run."""
POINTS, MOST_POINTS, FEWEST_POINTS = 30_000, 333, 30
"""Numbers of points of one metric: for all runs together, at most for one run, and at least for one run."""


def write_page(
    title: str, entries: Sequence[Entry], output: Path, refresh: float | None = None
) -> list[RunPage]:
    """Read the runs of ``entries``, write the page and return the runs.

    The page reloads itself every ``refresh`` seconds. None means never.
    """
    points = min(max(POINTS // len(entries), FEWEST_POINTS), MOST_POINTS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of the time is in Arrow, without the GIL
        runs = list(pool.map(partial(read_run, points=points), entries))
    output.parent.mkdir(parents=True, exist_ok=True)
    page = render(page_data(title, runs) | {"refresh": refresh})
    if output.exists() and not output.is_file():  # such as /dev/stdout, which no file must replace
        output.write_text(page, encoding="utf-8")
    else:
        write_atomic(output, page)
    return runs


def render(data: Config) -> str:
    """Return the template with styles, scripts and data; data is escaped so as not to close its element."""
    text = json.dumps(without_infinities(data), allow_nan=False, separators=(",", ":"))
    parts = {
        "style": assets("uPlot.min.css", "page.css"),
        "library": f"/*\n{assets('uPlot.LICENSE')}\n*/\n{assets('uPlot.iife.min.js')}",
        "script": assets("chart.js", "tables.js", "parallel.js", "page.js"),
        "data": text.replace("<", "\\u003c"),
    }
    page = assets("page.html")
    for name, text in parts.items():  # data comes last, so that nothing in it is replaced
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    return page


def assets(*names: str) -> str:
    """Return the concatenated contents of these files of ``ASSETS``."""
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def without_infinities(data: object) -> object:
    """Return ``data`` with NaN and infinite numbers as text, because JSON has no such numbers."""
    return json.loads(json.dumps(data), parse_constant=str)


def page_data(title: str, runs: Sequence[RunPage]) -> Json:
    documents: list[object] = []
    common, differing = split_configs(runs)
    columns = [key for key in varied_keys([run.overrides for run in runs]) if key not in NOT_TRAINED]
    peaks = {str(run.facts["mfu_peak"]) for run in runs if run.facts.get("mfu_peak")}
    return {
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "columns": columns,
        "mfu_peak": " or ".join(sorted(peaks)),
        "common": common,
        "documents": documents,
        "runs": [
            run_data(run, documents)
            | {"name": name, "config": {key: run.config[key] for key in differing if key in run.config}}
            | {"group": group}
            for run, name, group in zip(runs, run_names(runs, columns), group_names(runs), strict=True)
        ],
        "charts": [
            {
                "key": key,
                "note": f"of {' or '.join(sorted(peaks))}" if key == "perf/mfu" else None,
                "curves": [
                    {"run": number} | run.curves[key].to_json()
                    for number, run in enumerate(runs)
                    if key in run.curves
                ],
            }
            for key in chart_keys(runs)
        ],
    }


def run_names(runs: Sequence[RunPage], columns: Sequence[str]) -> list[str]:
    """Return a name for each run: its ``run.name`` and, among several runs, its values of ``columns``.

    The run's number is added to names that are not unique.
    """
    names = []
    for run in runs:
        known = [(key, run.overrides[key]) for key in columns[:MOST_WORDS] if key in run.overrides]
        words = [f"{key.rpartition('.')[2]}={value}" if "." in key else value for key, value in known]
        names.append(" · ".join([run.name, *(words if len(runs) > 1 else [])]))
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name} · {run.entry.number}"
        for run, name in zip(runs, names, strict=True)
    ]


def group_names(runs: Sequence[RunPage]) -> list[str]:
    """Return the group of each run in a ranking: its ``group``, and differing options of the same stage.

    Losses with other options, such as ``stage.loss`` or ``stage.beta``, are not comparable.
    """
    options: dict[str, list[Json]] = {}
    for run in runs:
        options.setdefault(run.group[0], []).append(run.stage_options)
    varied = {name: varied_keys(found) if len(found) > 1 else [] for name, found in options.items()}
    names = []
    for run in runs:
        name, own = run.group[0], run.stage_options
        names.append(", ".join([name, *(f"{key}={own[key]}" for key in varied[name] if key in own)]))
    return names


def run_data(run: RunPage, documents: list[object]) -> Json:
    """Return the data of one run for the page.

    Long tables are appended to ``documents``, each only once for all runs, and replaced by their index there.
    """
    entry, results, words = run.entry, run.results, run.entry.arguments
    loss = results.get("eval/loss", results.get("train/loss")) if entry.loss is None else entry.loss
    if run.diverged:
        loss = None
    _, ranked = run.group
    return {
        "number": entry.number,
        "folder": None if entry.folder is None else str(entry.folder),
        "status": run.status,
        "error": run.error,
        "overrides": run.overrides,
        "ranked": ranked,
        "loss": finite(loss),
        "seconds": finite(entry.seconds),
        "steps": run.steps,
        "axes": {name: run.curves[key].to_json() for name, key in AXES.items() if key in run.curves},
        "results": {key: finite(value) for key, value in results.items()},
        "command": None if words is None else shlex.join(["python", "-m", "runner", *words]),
        "facts": fact_tables(run.facts),
        "audit": limited_documents(documents, audit_tables(run.audit)),
        "preflight": limited_documents(documents, run.preflight),
        "samples": limited_documents(documents, run.samples),
        "completions": run.completions,
        "logs": run.logs,
        "missing": run.missing,
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def limited_documents(documents: list[object], document: object) -> int | None:
    """Return the index of ``document`` in ``documents``, adding it if needed. None means that it is empty."""
    if not document:
        return None
    document = without_infinities(document)
    if document not in documents:
        documents.append(document)
    return documents.index(document)


def chart_keys(runs: Sequence[RunPage]) -> list[str]:
    """Return the metrics with a chart: ``FIRST_CHARTS``, then all others that are not always zero."""
    logged = {key for run in runs for key, curve in run.curves.items() if curve.means.any()} - COUNTERS
    return [key for key in FIRST_CHARTS if key in logged] + sorted(logged - {*FIRST_CHARTS})


def varied_keys(mappings: Sequence[Config]) -> list[str]:
    """Return the keys whose values differ between the mappings; all keys of a single mapping."""
    keys = list(dict.fromkeys(key for mapping in mappings for key in mapping))
    if len(mappings) == 1:
        return keys
    return [key for key in keys if len({json.dumps(mapping.get(key)) for mapping in mappings}) > 1]


def split_configs(runs: Iterable[RunPage]) -> tuple[Json, list[str]]:
    """Return the settings that all configs share, and the keys in which they differ."""
    configs = [run.config for run in runs if run.config]
    if len(configs) < 2:
        return (configs[0] if configs else {}), []
    differing = varied_keys(configs)
    return {key: value for key, value in configs[0].items() if key not in set(differing)}, differing


def audit_tables(audit: Config | None) -> Json | None:
    """Return audit.json as a table with a column for each source."""
    if audit is None:
        return None
    splits = {name: split for name, split in audit.items() if isinstance(split, dict)}
    columns = {
        f"{name}: {source.get('name')}": source | {k: v for k, v in split.items() if k != "sources"}
        for name, split in splits.items()
        for source in split.get("sources", [])
    }
    rows = dict.fromkeys(key for column in columns.values() for key in column if key != "name")
    return {
        "data": [
            {"": row.replace("_", " ")} | {name: column.get(row) for name, column in columns.items()}
            for row in rows
        ]
    }
