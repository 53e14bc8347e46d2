"""The share of small mistakes that the quick tests find: ``python -m benchmarks.mutants --seed 0``.

Lines are drawn at random. Each is changed in one small way, which makes a mutant, in a copy of the checkout,
and the quick tests that cover the line run there. The mutant survives if none of them fails, and is killed
otherwise. Outcomes are written to results/mutants.json.
The exit code is 1 if too few mutants are killed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

import coverage

from benchmarks.mutants.coverage_map import CoverageMap, map_of
from benchmarks.mutants.operators import Finder, Mutant, draw
from benchmarks.mutants.trial import Tree
from benchmarks.throughput import RESULTS, report

ROOT = Path(__file__).parents[2]
FOLDERS = ("losses", "data", "engines", "checkpoint", "adapters", "models")
MUTATED = (*(f"components/{name}" for name in FOLDERS), "runner/training/loop.py")


def drawn_from(root: Path, paths: Sequence[str], count: int, seed: int) -> dict[Mutant, bytes]:
    """Draw ``count`` mutants of the files at and below ``paths``; return each with the source of its file."""
    files = [file for path in paths for file in (root / path, *(root / path).rglob("*.py")) if file.is_file()]
    sources = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    analyst = coverage.Coverage(data_file=None, config_file=str(root / "pyproject.toml"))
    finders = [
        Finder(path, text, set(analyst.analysis2(str(root / path))[2])) for path, text in sources.items()
    ]
    mutants = draw(sources, (mutant for finder in finders for mutant in finder.mutants()), count, seed)
    return {mutant: sources[mutant.path] for mutant in mutants}


def judge_all(
    mutants: Mapping[Mutant, bytes], covered: CoverageMap, trees: Sequence[Tree]
) -> list[dict[str, Any]]:
    """Try the mutants, as many at the same time as there are trees, and return the facts of each."""
    free: Queue[Tree] = Queue()
    for tree in trees:
        free.put(tree)

    def judge(mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
        tree, start = free.get(), time.monotonic()
        record = tree.judge(mutant, mutants[mutant], tests)
        free.put(tree)
        facts = {"path": mutant.path, "line": mutant.line, "operator": mutant.change[0]}
        facts |= {"diff": mutant.diff(mutants[mutant]), "tests": len(tests), **record._asdict()}
        return facts | {"seconds": round(time.monotonic() - start, 1)}

    found = []
    with ThreadPoolExecutor(len(trees)) as pool:
        trials = [pool.submit(judge, mutant, covered.tests(mutant)) for mutant in mutants]
        try:
            for trial in as_completed(trials):
                found.append(trial.result())
                print(f"{len(found)}/{len(mutants)} {described(found[-1])}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return sorted(found, key=lambda facts: (facts["path"], facts["line"]))


def described(facts: Mapping[str, Any]) -> str:
    result = f"killed by {facts['killer']}" if facts["killer"] else "not covered"
    if facts["tests"] and not facts["killer"]:
        result = f"survived after {facts['passed']} of {facts['tests']} tests"
    return f"{facts['path']}:{facts['line']} {facts['operator']}: {result} {facts['stopped']}".rstrip()


def keep(found: Sequence[Mapping[str, Any]], arguments: Sequence[str], share: float) -> None:
    about = report("benchmarks.mutants", arguments, f"{os.cpu_count()} cores", [], {})
    versions = about["versions"] | {name: version(name) for name in ("pytest", "coverage")}
    facts = {key: about[key] for key in ("command", "date", "device")}
    facts |= {"versions": versions, "killed": round(share, 4), "mutants": found}
    (RESULTS / "mutants.json").write_text(json.dumps(facts, indent=2) + "\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="how many lines are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-least", type=float, default=0.85, help="share that must be killed")
    parser.add_argument("--only", nargs="+", metavar="PATH", default=MUTATED, help="files or folders")
    parser.add_argument("--limit-s", type=float, default=180.0, help="per mutant, if each job has a core")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    parser.add_argument("--map", type=Path, metavar="FILE", help="coverage data, next to a durations.jsonl")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    asked = parse(arguments)
    mutants = drawn_from(ROOT, asked.only, asked.count, asked.seed)
    if not mutants:
        sys.exit("there is nothing to mutate")
    if asked.list:
        for mutant, source in mutants.items():
            print(f"{mutant.path}:{mutant.line} {mutant.change[0]}", *mutant.diff(source), sep="\n")
        return
    covered = map_of(ROOT, asked.map)
    limit_s = asked.limit_s * max(1.0, asked.jobs / (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Tree(ROOT, Path(scratch, str(job)), covered.seconds, limit_s) for job in range(asked.jobs)]
        found = judge_all(mutants, covered, trees)
    survivors = [facts for facts in found if not facts["killer"]]
    for facts in survivors:
        print(f"\n{described(facts)}", *facts["diff"], sep="\n")
    share = 1 - len(survivors) / len(found)
    print(f"\n{len(found) - len(survivors)} of {len(found)} mutants killed ({share:.1%})")
    keep(found, arguments, share)
    if share < asked.at_least:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
