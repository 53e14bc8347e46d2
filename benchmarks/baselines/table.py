"""The printed table and the JSON rows of a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.baselines.programs import LOOP, OURS, Work
from benchmarks.baselines.runs import Run, medians


@dataclass(frozen=True)
class Line:
    """Runs of one program on one work item."""

    work: Work
    program: str
    runs: Sequence[Run]
    note: str | None = None
    """Reason why there are no runs, or fewer than requested."""

    @property
    def median(self) -> Run | None:
        return medians(self.runs) if self.runs else None


@dataclass(frozen=True)
class Shares:
    """Ratios of a program's results to those of the hand-written loop, this runner and a matrix product.

    None means that the loop or this runner was not measured.
    """

    of_loop: float | None
    of_ours: float | None
    of_matmul: float | None
    """Rate of FLOPs, by the loop's number of FLOPs per token, divided by the machine's matmul rate."""
    start_of_loop: float | None
    """Processor time until the end of the first step, divided by that of the loop."""


def shares(line: Line, lines: Sequence[Line], rates: Mapping[str, float]) -> Shares:
    here = {other.program: other.median for other in lines if other.work == line.work}
    run, loop, ours = line.median, here.get(LOOP), here.get(OURS)
    assert run is not None
    speed, flops = run.tokens_per_cpu_second, None if loop is None else loop.flops_per_token
    return Shares(
        of_loop=None if loop is None else speed / loop.tokens_per_cpu_second,
        of_ours=None if ours is None else speed / ours.tokens_per_cpu_second,
        of_matmul=None if flops is None else speed * flops / rates[line.work.dtype],
        start_of_loop=None if loop is None else run.first_step_cpu_seconds / loop.first_step_cpu_seconds,
    )


def table(lines: Sequence[Line], rates: Mapping[str, float]) -> Table:
    title = "useful tokens per CPU second, one thread, median of all runs"
    result = Table(title=title, caption="start: to the end of the first step; labels: per useful token")
    headings = ("program", "tokens/s", "of ours", "of the loop", "of matmul", "labels", "peak MiB")
    result.add_column("work")
    for heading in (*headings, "start, s", "start, CPU s", "of the loop's"):
        result.add_column(heading, justify="left" if heading == "program" else "right")
    for number, line in enumerate(lines):
        new = number == 0 or lines[number - 1].work != line.work
        if new and number:
            result.add_section()
        result.add_row(line.work.name if new else "", line.program, *cells(line, lines, rates))
    return result


def cells(line: Line, lines: Sequence[Line], rates: Mapping[str, float]) -> list[str]:
    run = line.median
    if run is None:
        return ["-"]
    share = shares(line, lines, rates)
    return [
        f"{run.tokens_per_cpu_second:.0f}",
        ratio(share.of_ours),
        ratio(share.of_loop),
        "" if share.of_matmul is None else f"{100 * share.of_matmul:.0f} %",
        f"{run.labels_per_token:.2f}",
        f"{run.peak_mib:.0f}",
        f"{run.first_step_seconds:.1f}",
        f"{run.first_step_cpu_seconds:.1f}",
        ratio(share.start_of_loop),
    ]


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def notes(lines: Sequence[Line]) -> list[str]:
    """Return each note once with its program and work items."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.note is not None:
            reasons.setdefault((line.program, line.note), []).append(line.work.name)
    return [f"{program} ({', '.join(works)}): {note}" for (program, note), works in reasons.items()]


def report(lines: Sequence[Line], rates: Mapping[str, float], work: Work) -> list[dict[str, Any]]:
    """Return one JSON object per line of a work item, with the speeds of all runs."""
    rows = []
    for line in (line for line in lines if line.work == work):
        row: dict[str, Any] = {"program": line.program, "note": line.note}
        if (run := line.median) is not None:
            row |= {"median": asdict(run), "shares": asdict(shares(line, lines, rates))}
            row["tokens_per_cpu_second"] = [run.tokens_per_cpu_second for run in line.runs]
        rows.append(row)
    return rows
