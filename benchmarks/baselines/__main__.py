"""The same model trained on the same samples by this runner and by other programs.

``python -m benchmarks.baselines --data DIR --peer trl=VENV/bin/python --peer litgpt=VENV/bin/python``

A peer is another training program in an environment of its own, in which the same version of torch as here is
installed first, then the peer. No network is used, and missing programs are skipped with a note.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.baselines.order import write_order
from benchmarks.baselines.programs import PEERS, WORKS, Case, Program, Work, programs
from benchmarks.baselines.runs import ROOT, Failed, Run, environment, run
from benchmarks.baselines.samples import make_samples
from benchmarks.baselines.table import Line, notes, report, table

RESULTS = ROOT / "benchmarks" / "results" / "baselines.json"


def main(arguments: Sequence[str]) -> int:
    """Compare all programs; return the exit code, 1 if this runner or the hand-written loop failed."""
    asked = parse(arguments)
    data, cache, console = asked.cache / "data", asked.cache, Console(width=160)
    data.mkdir(parents=True, exist_ok=True)
    make_samples(asked.data, data)
    chosen = [p for p in programs(dict(asked.peer), dict(asked.other)) if p.name in (asked.only or [p.name])]
    rates, lines = matmul_rates(cache), []
    for work in (work for work in WORKS if work.name in asked.work):
        order = None if work.stage == "pt" else write_order(work, data, asked.steps, cache)
        case = Case(work, data, order, asked.steps)
        lines += compare(case, [p for p in chosen if p.does(work)], asked.runs, cache, console)
        measured = about(asked, work, chosen, rates) | {"rows": report(lines, rates, work)}
        keep(asked.output, work.name, measured)
    console.print(table(lines, rates))
    for note in notes(lines):
        console.print(note)
    own = [line for line in lines if line.program in {"ours", "loop"}]
    return 0 if all(line.runs and line.note is None for line in own) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [work.name for work in WORKS]
    peers = sorted({program.name.split(",")[0] for program in PEERS})
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="LLaMA-Factory's demo files, as they are")
    parser.add_argument("--work", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs, as the table names them")
    parser.add_argument("--runs", type=int, default=5, help="of each program, in turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is left out (%(default)s)")
    parser.add_argument(
        "--peer",
        action="append",
        type=pair,
        default=[],
        metavar="NAME=PYTHON",
        help=f"where a peer is installed; NAME: {', '.join(peers)}",
    )
    parser.add_argument(
        "--other",
        action="append",
        type=pair,
        default=[],
        metavar="NAME=COMMAND",
        help="another program that writes events into BENCH_OUT (baselines/events.py); its command "
        "may hold {stage} {dtype} {steps} {data} {order} {output}, and {shared}: --shared for shared prompts",
    )
    parser.add_argument("--cache", type=Path, default=Path("outputs", "peers").absolute(), help="kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results/baselines.json")
    asked = parser.parse_args(arguments)
    if asked.steps < 2:
        parser.error("--steps: the first step is left out; give at least 2.")
    if unknown := {name for name, _ in asked.peer} - set(peers):
        parser.error(f"--peer: {', '.join(sorted(unknown))} is none of {', '.join(peers)}.")
    return asked


def pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE")
    return name, value


def compare(case: Case, chosen: Sequence[Program], count: int, cache: Path, console: Console) -> list[Line]:
    """Run each program ``count`` times, in turns, so that other load on the machine affects all programs."""
    runs: dict[str, list[Run]] = {program.name: [] for program in chosen}
    reasons: dict[str, str | None] = {program.name: program.missing() for program in chosen}
    for turn in range(count):
        for program in chosen:
            name = program.name
            if reasons[name] is not None:
                continue
            try:
                runs[name].append(run(program, case, cache))
            except Failed as failure:
                reasons[name] = str(failure)
            speed = f"{runs[name][-1].tokens_per_cpu_second:.0f}" if reasons[name] is None else reasons[name]
            console.print(f"{case.work.name}, turn {turn + 1}: {name} {speed}", style="dim", markup=False)
    return [Line(case.work, program.name, runs[program.name], reasons[program.name]) for program in chosen]


def matmul_rates(cache: Path) -> dict[str, float]:
    """Return, for each dtype, the FLOPs per processor second of matrix products on one thread."""
    command = [sys.executable, "-m", "benchmarks.baselines.matmul"]
    env = environment(cache / "none", cache)
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=env, cwd=ROOT).stdout)


def keep(output: Path, work: str, measured: dict[str, Any]) -> None:
    """Write the results of one work item to ``output``, in which those of other items are kept."""
    works = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(works | {work: measured}, indent=2) + "\n")


def about(
    asked: argparse.Namespace, work: Work, chosen: Sequence[Program], rates: dict[str, float]
) -> dict[str, Any]:
    return {
        "command": command(asked, work),
        "date": date.today().isoformat(),
        "processor": processor(),
        "matmul_flops_per_cpu_second": rates,
        "runs": asked.runs,
        "steps": asked.steps,
        "versions": {program.name: program.versions() for program in chosen if program.packages},
    }


def command(asked: argparse.Namespace, work: Work) -> str:
    """Return the command to measure a work item again, with placeholders for local paths."""
    words = ["python", "-m", "benchmarks.baselines", "--data=DATA", f"--work={work.name}"]
    words += [f"--runs={asked.runs}", f"--steps={asked.steps}"]
    words += [f"--peer={name}=PYTHON" for name, _ in asked.peer]
    words += [f"--other={name}=COMMAND" for name, _ in asked.other]
    words += ["--only", *asked.only] if asked.only else []
    return shlex.join(words)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
