"""Puts what is known of runs into one HTML file that needs nothing else."""

import json
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path

from components.contracts.json_types import Config, Json
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
}
"""Logged, but nothing to look at."""
POINTS, MOST_POINTS, FEWEST_POINTS = 30_000, 333, 30
"""Means of one metric: of all runs together, and of each. Each mean comes with its two extremes."""


def write_page(title: str, entries: Sequence[Entry], output: Path) -> list[RunPage]:
    """Reads the runs of ``entries`` and writes the page; returns what was read, for a summary."""
    points = min(max(POINTS // len(entries), FEWEST_POINTS), MOST_POINTS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of it is Arrow, which runs beside Python
        runs = list(pool.map(partial(read_run, points=points), entries))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(page_data(title, runs)), encoding="utf-8")
    return runs


def render(data: Config) -> str:
    """The template with styles, scripts and data; nothing in ``data`` can end its element."""
    text = json.dumps(without_infinities(data), allow_nan=False, separators=(",", ":"))
    parts = {
        "style": assets("uPlot.min.css", "page.css"),
        "library": f"/*\n{assets('uPlot.LICENSE')}\n*/\n{assets('uPlot.iife.min.js')}",
        "script": assets("chart.js", "tables.js", "page.js"),
        "data": text.replace("<", "\\u003c"),
    }
    page = assets("page.html")
    for name, text in parts.items():  # data comes last: what it holds is not looked at again
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    return page


def assets(*names: str) -> str:
    """Return files of this folder, one after the other."""
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def without_infinities(data: object) -> object:
    """As JSON has it: a setting may be infinite, which is a word there."""
    return json.loads(json.dumps(data), parse_constant=str)


def page_data(title: str, runs: Sequence[RunPage]) -> Json:
    documents: list[object] = []
    keys = chart_keys(runs)
    common, differing = split_configs(runs)
    return {
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "columns": varied_keys([run.overrides for run in runs]),
        "common": common,
        "documents": documents,
        "runs": [
            shown(run, documents)
            | {"config": {key: run.config[key] for key in differing if key in run.config}}
            for run in runs
        ],
        "charts": [
            {
                "key": key,
                "curves": [
                    {"run": number} | run.curves[key].to_json()
                    for number, run in enumerate(runs)
                    if key in run.curves
                ],
            }
            for key in keys
        ],
    }


def shown(run: RunPage, documents: list[object]) -> Json:
    """One run; long tables that runs share are in ``documents``, once."""
    entry, results, words = run.entry, run.results, run.facts.get("overrides")
    loss = results.get("eval/loss", results.get("train/loss")) if entry.loss is None else entry.loss
    return {
        "number": entry.number,
        "folder": None if entry.folder is None else str(entry.folder),
        "status": run.status,
        "error": run.error,
        "overrides": run.overrides,
        "loss": finite(loss),
        "seconds": finite(entry.seconds),
        "steps": run.steps,
        "results": {key: finite(value) for key, value in results.items()},
        "command": None if words is None else shlex.join(["python", "-m", "runner", *words]),
        "facts": fact_tables(run.facts),
        "audit": limited_documents(documents, audit_tables(run.audit)),
        "preflight": limited_documents(documents, run.preflight),
        "logs": run.logs,
        "missing": run.missing,
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def limited_documents(documents: list[object], document: object) -> int | None:
    """Its place in ``documents``."""
    if not document:
        return None
    document = json.loads(json.dumps(document), parse_constant=str)  # NaN is not JSON, but Python writes it
    if document not in documents:
        documents.append(document)
    return documents.index(document)


def chart_keys(runs: Sequence[RunPage]) -> list[str]:
    """The usual ones first, then what else was logged and is not always zero."""
    logged = {key for run in runs for key, curve in run.curves.items() if curve.means.any()} - COUNTERS
    return [key for key in FIRST_CHARTS if key in logged] + sorted(logged - {*FIRST_CHARTS})


def varied_keys(mappings: Sequence[Config]) -> list[str]:
    """Keys that do not have one value everywhere; of a single mapping, all."""
    keys = list(dict.fromkeys(key for mapping in mappings for key in mapping))
    if len(mappings) == 1:
        return keys
    return [key for key in keys if len({json.dumps(mapping.get(key)) for mapping in mappings}) > 1]


def split_configs(runs: Iterable[RunPage]) -> tuple[Json, list[str]]:
    """What every config has in common, and the keys in which configs differ."""
    configs = [run.config for run in runs if run.config]
    if len(configs) < 2:
        return (configs[0] if configs else {}), []
    differing = varied_keys(configs)
    return {key: value for key, value in configs[0].items() if key not in set(differing)}, differing


def audit_tables(audit: Config | None) -> Json | None:
    """audit.json as tables: a column for every source."""
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
