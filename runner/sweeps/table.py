"""The table at the end of a sweep, with a row for each job and a column for each key that varies."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner.records.job_record import JobRecord, best, varied_overrides

STYLES = {"failed": "red", "invalid": "yellow", "pruned": "dim", "interrupted": "dim"}


def print_table(records: Sequence[JobRecord], console: Console) -> None:
    """Print the table, with run folders if the console is wide enough, and then the error of each job."""
    wide = sweep_table(records, folders=True)
    fits = Measurement.get(console, console.options.update(width=1000), wide).maximum <= console.width
    console.print(wide if fits else sweep_table(records, folders=False))
    for record in records:
        if record.error:
            lines = record.error.strip().splitlines()
            # A mistake may have its remedy in a second line; the last line of a traceback is the exception.
            shown = " ".join(lines) if record.status == "invalid" else lines[-1].strip()
            console.print(Text(f"job {record.number} {record.status}: {shown}"), soft_wrap=True)


def sweep_table(records: Sequence[JobRecord], *, folders: bool) -> Table:
    """Build the table, with a row for each job and a column for each key that varies between the jobs."""
    own = varied_overrides(records) if len(records) > 1 else [()]
    points = [dict(word.partition("=")[::2] for word in words) for words in own]
    keys = list(dict.fromkeys(key for point in points for key in point))
    table, winner = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False), best(records)
    table.add_column("job", justify="right", no_wrap=True)
    for name in short_keys(keys):
        table.add_column(Text(name), overflow="fold")
    table.add_column("result", no_wrap=True)
    for name in ("loss", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    if folders:
        table.add_column("run folder", no_wrap=True)
    for record, point in zip(records, points, strict=True):
        loss = "" if record.loss is None else f"{record.loss:.4f}"
        seconds = "" if record.seconds is None else f"{record.seconds:.0f}"
        values = [Text(format_value(point.get(key, ""))) for key in keys]
        mark = " *" if record is winner else "  "
        where = ["/".join(Path(record.folder or "").parts[-2:])] if folders else []
        table.add_row(
            str(record.number),
            *values,
            record.status,
            loss + mark,
            seconds,
            *where,
            style="bold" if record is winner else STYLES.get(record.status),
        )
    return table


def format_value(value: str) -> str:
    """Round a number with 7 or more decimals, as a sweep's optimiser samples it, to 4 significant digits."""
    return f"{float(value):.4g}" if re.fullmatch(r"\d+\.\d{7,}(e-?\d+)?", value) else value


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, such as ``lr``, or the whole key if the last part is ambiguous."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return [name if last[name := key.rpartition(".")[2]] == 1 else key for key in keys]
