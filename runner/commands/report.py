"""``python -m runner.report FOLDER ... [output=FILE] [--watch]``: a page of runs, sweeps or folders of runs.

FOLDER       a run (outputs/NAME/STAMP), a sweep (outputs/sweeps/STAMP), or a folder that holds runs; several
             are compared on one page
output=FILE  default: report.html in FOLDER, or in the current folder for several
--watch      write the page again every few seconds, which then reloads itself, until Ctrl-C
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import ConfigError
from components.home import expand_home
from components.report import FORECAST, Entry, RunPage, is_forecast, write_page
from runner.cli import run_or_answer
from runner.commands.arguments import first_line
from runner.config.command_line import is_sweep, single_job_overrides
from runner.records.job_record import JobRecord, read_job_records
from runner.records.run_record import RunRecord

WATCH_S = 5.0
"""Seconds between two writes of the page with ``--watch``."""
PAGE = "report.html"
MOST_NAMES = 3
"""Maximum number of folders that the title of a page names."""


def report(arguments: Sequence[str]) -> None:
    watched = "--watch" in arguments
    folders, output = parse([argument for argument in arguments if argument != "--watch"])
    runs = write(folders, output, WATCH_S if watched else None)
    counts = Counter(run.status for run in runs)
    print(f"{len(runs)} run(s): {', '.join(f'{count} {status}' for status, count in counts.items())}")
    print(output, flush=True)
    if watched:
        watch(folders, output)


def watch(folders: Sequence[Path], output: Path) -> None:
    """Write the page every ``WATCH_S`` seconds until Ctrl-C, then once more without automatic refresh.

    Raises:
        KeyboardInterrupt: if another signal than Ctrl-C ends it.
    """
    try:
        while True:
            time.sleep(WATCH_S)
            write(folders, output, WATCH_S)
    except KeyboardInterrupt as request:
        write(folders, output, None)
        if str(request) not in ("", "SIGINT"):
            raise


def write(folders: Sequence[Path], output: Path, refresh: float | None) -> list[RunPage]:
    names = [f"{folder.parent.name} / {folder.name}" for folder in folders]
    title = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} folders"
    try:
        return write_page(title, all_entries(folders), output, refresh)
    except OSError as error:
        raise ConfigError(
            f"output: cannot write {output}: {error.strerror}; give output=FILE with a writable file."
        ) from error


def parse(arguments: Sequence[str]) -> tuple[list[Path], Path]:
    """Return the folders and the path of the page, all absolute.

    Raises:
        ConfigError: if the arguments are anything else, or a folder or the path cannot be used.
    """
    usage = f"Usage: {first_line(__doc__)}"
    given = [argument for argument in arguments if re.match(r"[a-z_]+=", argument)]
    named = [argument for argument in arguments if argument not in given]
    options = dict(argument.split("=", maxsplit=1) for argument in given)
    for key in options:
        if key != "output":
            raise ConfigError(f"{key}: is not an option; the only one is output=FILE. {usage}")
    if not named:
        raise ConfigError(f"FOLDER: none is given; give one or several. {usage}")
    folders = [Path(expand_home("FOLDER", name)).absolute() for name in named]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give that of a run, of a sweep, or of runs.")
    default = folders[0] / PAGE if len(folders) == 1 else PAGE
    output = Path(expand_home("output", options.get("output", str(default)))).absolute()
    if output.is_dir():
        raise ConfigError(f"output: {output} is a folder; name a file in it, such as output={output}/{PAGE}.")
    return folders, output


def all_entries(folders: Sequence[Path]) -> list[Entry]:
    """Return the entries of ``folders``, each run folder once; those of several folders are numbered anew.

    Raises:
        ConfigError: if one of the folders has no run.
    """
    found = [(folder, each) for folder in folders for each in entries(folder)]
    if len(folders) == 1:
        return [each for _, each in found]
    unique: dict[Path | int, Entry] = {}
    for place, (source, each) in enumerate(found):
        key = place if each.folder is None else each.folder.resolve()  # a refused job has no folder
        # The record of a job says more than its folder, and that of the last sweep to continue it the most.
        last = each.status is not None and source.name == sweep_of(each.folder)
        if key not in unique or unique[key].status is None or last:
            unique[key] = each
    return [replace(each, number=number) for number, each in enumerate(unique.values())]


def entries(folder: Path) -> list[Entry]:
    """Return the run or forecast in ``folder``, its jobs if it is a sweep, or else the runs in it.

    Runs are found up to two levels below ``folder``, and are sorted by stamp.

    Raises:
        ConfigError: if there is none of these.
    """
    if (folder / "run.json").is_file():
        return [Entry(0, folder, arguments_of(folder))]
    if is_forecast(folder):
        return [Entry(0, folder, status=FORECAST)]
    if records := read_job_records(folder):
        return [entry(folder, record) for record in records]
    found = sorted(
        {*folder.glob("*/run.json"), *folder.glob("*/*/run.json")}, key=lambda path: path.parts[-2]
    )
    if not found and (folder / "sweep.json").is_file():
        raise ConfigError(f"{folder}: no job of this sweep has begun; give the command again when one has.")
    if not found:
        raise ConfigError(
            f"{folder}: holds no run and no sweep; give outputs/NAME/STAMP or outputs/sweeps/STAMP."
        )
    return [Entry(number, path.parent, arguments_of(path.parent)) for number, path in enumerate(found)]


def entry(sweep: Path, record: JobRecord) -> Entry:
    folder = None if record.folder is None else where_now(sweep, Path(record.folder))
    completed = record.status == "completed"  # a forecast may be written and then refused
    status = FORECAST if completed and folder is not None and is_forecast(folder) else record.status
    changed = {"folder": folder, "arguments": folder and arguments_of(folder), "status": status}
    return Entry(**vars(record) | changed)


def arguments_of(run: Path) -> list[str] | None:
    """Return the arguments that start ``run`` outside of a sweep.

    None means that its run.json is missing or cannot be read.
    """
    record = read_record(run)
    if record is None:
        return None
    if record.sweep is not None or is_sweep(record.command) or not record.command:
        return single_job_overrides(record.overrides, record.command)
    return list(record.command[1:])


def sweep_of(run: Path | None) -> str | None:
    """Return the name of the folder of the last sweep that ``run`` was a job of, or None without one."""
    record = None if run is None else read_record(run)
    return None if record is None or record.sweep is None else Path(record.sweep.folder).name


def read_record(run: Path) -> RunRecord | None:
    """Return the record of ``run``, or None if it cannot be read, which the page shows."""
    try:
        return RunRecord.read(run)
    except (ConfigError, OSError):
        return None


def where_now(sweep: Path, folder: Path) -> Path:
    """Return the present path of the run folder that a job of ``sweep`` recorded as ``folder``.

    If ``folder`` does not exist, but NAME/STAMP of the run exists next to the folder of all sweeps, that path
    is returned, because all outputs may have been moved or copied together. Otherwise it is ``folder``.
    """
    moved = sweep.parent.parent.joinpath(*folder.parts[-2:])
    return moved if not folder.is_dir() and moved.is_dir() else folder


def main() -> NoReturn:
    sys.exit(run_or_answer(report, __doc__))
