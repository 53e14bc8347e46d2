"""Print the results as the table of the README: ``python -m benchmarks.baselines.markdown``."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.baselines.__main__ import RESULTS
from benchmarks.baselines.programs import WORKS

COLUMNS = {
    "ours": "this runner",
    "llamafactory": "LLaMA-Factory",
    "axolotl": "axolotl",
    "trl": "TRL",
    "hf": "HF Trainer",
    "litgpt": "litgpt",
    "loop": "hand-written loop",
}
COMPILED = ", compiled"


def markdown(results: Mapping[str, Any]) -> str:
    """Return a Markdown table with tokens (without padding) per processor second, and peak memory in MiB.

    Each work item without shared prompts has a line, and a second line for compiled programs if there are
    any.
    """
    ran = {row["program"].removesuffix(COMPILED) for work in results.values() for row in work["rows"]}
    names = [name for name in COLUMNS if name in ran]
    lines = [["work", *(COLUMNS[name] for name in names)], ["---"] * (1 + len(names))]
    # With shared prompts, batches differ, so that the cost per token cannot be compared.
    alike = (work for work in WORKS if not work.share_prompt)
    for work in (work.name for work in alike if work.name in results):
        rows = {row["program"]: row for row in results[work]["rows"]}
        for suffix in ("", COMPILED):
            cells = [cell(rows.get(name + suffix)) for name in names]
            if any(cells):
                lines.append([work.replace("-", " ") + suffix, *cells])
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "median" not in row:
        return ""
    return f"{row['median']['tokens_per_cpu_second']:.0f} ({row['median']['peak_mib']:.0f})"


if __name__ == "__main__":
    print(markdown(json.loads(RESULTS.read_text())))
