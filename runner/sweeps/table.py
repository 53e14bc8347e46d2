"""The table at the end of a sweep: a row for each job, a column for each key that varies."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner.sweeps.job_record import Outcome, best, varied

STYLES = {"failed": "red", "refused": "yellow", "pruned": "dim", "stopped": "dim"}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, with run folders if the console is wide enough, and then the error of each job."""
    wide = sweep_table(outcomes, folders=True)
    fits = Measurement.get(console, console.options.update(width=1000), wide).maximum <= console.width
    console.print(wide if fits else sweep_table(outcomes, folders=False))
    for outcome in outcomes:
        if outcome.error:
            last = outcome.error.rstrip().splitlines()[-1].strip()
            console.print(Text(f"job {outcome.number} {outcome.status}: {last}"), soft_wrap=True)


def sweep_table(outcomes: Sequence[Outcome], *, folders: bool) -> Table:
    """Build the table: a row per job, by number, and a column per key that not all jobs have in common."""
    own = varied(outcomes) if len(outcomes) > 1 else [()]
    points = [dict(word.partition("=")[::2] for word in words) for words in own]
    keys = list(dict.fromkeys(key for point in points for key in point))
    table, winner = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False), best(outcomes)
    table.add_column("job", justify="right", no_wrap=True)
    for name in short_names(keys):
        table.add_column(Text(name), overflow="fold")
    table.add_column("result", no_wrap=True)
    for name in ("loss", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    if folders:
        table.add_column("run folder", no_wrap=True)
    for outcome, point in zip(outcomes, points, strict=True):
        loss = "" if outcome.loss is None else f"{outcome.loss:.4f}"
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:.0f}"
        values = [Text(in_short(point.get(key, ""))) for key in keys]
        mark = " *" if outcome is winner else "  "
        where = ["/".join(Path(outcome.folder or "").parts[-2:])] if folders else []
        table.add_row(
            str(outcome.number),
            *values,
            outcome.status,
            loss + mark,
            seconds,
            *where,
            style="bold" if outcome is winner else STYLES.get(outcome.status),
        )
    return table


def in_short(value: str) -> str:
    """Shorten a number drawn by an optimiser from 17 digits to 4, enough to distinguish it."""
    return f"{float(value):.4g}" if re.fullmatch(r"[\d.]{9,}(e-?\d+)?", value) else value


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, such as ``lr``, or the whole key if the last part is ambiguous."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return [name if last[name := key.rpartition(".")[2]] == 1 else key for key in keys]
