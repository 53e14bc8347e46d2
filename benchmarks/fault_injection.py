"""Runs of two ranks that are killed many times: ``python -m benchmarks.fault_injection [--kills 100]``.

SIGKILL, SIGTERM, or SIGSTOP and then SIGKILL is sent to a random rank or to the parent at random times, half
of them while a checkpoint is being written. Each time, the run is started again with
``checkpoint.resume=auto``. There is one run for each engine and way to save, at once or in the
background. At the end of each run, the weights must be bitwise those of an uninterrupted run, no process may
be left, and every complete checkpoint must have been readable.
"""

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.throughput import RESULTS, report
from components.checkpoint.dcp import load_tensors
from components.checkpoint.folder import complete_checkpoints, is_complete, step_of
from components.checkpoint.resume import inspect_checkpoint
from components.checkpoint.safe_reader import read_metadata

LAYOUTS = ("fsdp2", "megatron_dp2")
SMALL = (
    "stage=pt",
    "run.name=chaos",
    "run.device=cpu",
    "run.export=false",
    "run.eval_at_end=false",
    "run.micro_batch_size=1",
    "checkpoint.save_every=2",
    "checkpoint.keep_last=2",
    "data.max_length=128",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.num_hidden_layers=2",
)
STEPS_A_KILL = 20
"""Number of steps of a run for each kill. It is more than a start completes before it is killed."""
START_S = 300.0
"""Time limit in seconds for the first step of a run."""
LEAVING_S, GONE_S = 60.0, 5.0
"""Time limits in seconds for the end of the parent of a killed rank, and then of all its processes."""
ENDS = {
    "kill": (signal.SIGKILL,),
    "terminate": (signal.SIGTERM,),
    "stop and kill": (signal.SIGSTOP, signal.SIGKILL),
}
STOPPED_S = 1.0
"""Time in seconds between SIGSTOP and SIGKILL."""


@dataclass
class Tally:
    """Counts of kills (in all, by signals, by time and by target) and of starts, and the errors found."""

    kills: int = 0
    signals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    in_a_save: int = 0
    of_the_parent: int = 0
    starts: int = 0
    orphans: int = 0
    unreadable: list[str] = field(default_factory=list)


class Run:
    """One experiment in its own folder, which can be started many times."""

    def __init__(self, folder: Path, layout: str, steps: int, *, in_background: bool = False) -> None:
        self.folder, self.layout, self.steps = folder, layout, steps
        self.in_background = in_background

    def start(self) -> "subprocess.Popen[bytes]":
        options = [f"parallelism={self.layout}", "parallelism.dp=2", f"run.max_steps={self.steps}"]
        options += ["checkpoint.async_save=true"] if self.in_background else []
        command = [sys.executable, "-m", "runner", *SMALL, *options, "checkpoint.resume=auto"]
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [*command, f"run.output_dir={self.folder}"], stdout=log, stderr=log, start_new_session=True
            )

    @property
    def current(self) -> Path:
        """Newest run folder. Each start makes a new one until there is a checkpoint to resume from."""
        return max(self.folder.glob("chaos/*"), default=self.folder / "none")

    @property
    def checkpoints(self) -> Path:
        return self.current / "checkpoints"

    def torn(self) -> set[str]:
        """Return the names of incomplete checkpoints, which are being written or were left by a kill."""
        return {path.name for path in self.checkpoints.glob("step_*") if not is_complete(path)}

    def logged(self) -> tuple[int, int]:
        """Return the inode of metrics.jsonl, which is new after each start, and its number of rows."""
        path = self.current / "metrics.jsonl"
        return (path.stat().st_ino, path.read_bytes().count(b"\n")) if path.exists() else (0, 0)

    def rows_at_start(self) -> int:
        saved = complete_checkpoints(self.checkpoints)
        return step_of(saved[-1]) if saved else 0


def wait_for_moment(run: Run, process: "subprocess.Popen[bytes]", rng: random.Random) -> bool | None:
    """Wait until a random time after the first step.

    Return True during a save, False at another time, and None if the run has ended.
    """
    known, (file, _), rows = run.torn(), run.logged(), run.rows_at_start()
    deadline = time.monotonic() + START_S
    while run.logged()[0] in (0, file) or run.logged()[1] <= rows:
        if process.poll() is not None:
            return None
        assert time.monotonic() < deadline, f"no step in {START_S:g} s: {run.folder / 'output.log'}"
        time.sleep(0.01)
    if rng.random() < 0.5:
        while process.poll() is None:
            if run.torn() - known:
                time.sleep(rng.uniform(0, 0.03))
                return True
            time.sleep(0.001)
        return None
    time.sleep(rng.uniform(0, 0.5))
    return None if process.poll() is not None else False


def kill(process: "subprocess.Popen[bytes]", tally: Tally, rng: random.Random) -> list[psutil.Process]:
    """End the parent or one of its ranks by signals, and return all processes that must end soon."""
    parent = psutil.Process(process.pid)
    ranks = [child for child in parent.children() if os.getsid(child.pid) == child.pid]
    victims = [parent, *ranks]
    everything = [parent, *parent.children(recursive=True)]
    victim = rng.choice(victims)
    tally.of_the_parent += victim is parent
    end = rng.choice(list(ENDS))
    tally.signals[end] += 1
    first, *further = ENDS[end]
    victim.send_signal(first)
    for number in further:
        time.sleep(STOPPED_S)
        victim.send_signal(number)
    return everything


def orphans(processes: Sequence[psutil.Process], within: float = GONE_S) -> int:
    """Return the number of processes, without zombies, that still run after ``within`` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    return sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in alive)


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint in this process."""
    known = read_metadata(checkpoint).state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_tensors(checkpoint, found)
    return found


def unreadable(run: Run) -> Iterator[str]:
    """Yield the complete checkpoints whose checksums are wrong."""
    for checkpoint in complete_checkpoints(run.checkpoints):
        if wrong := inspect_checkpoint(checkpoint, checksums=True)[1]:
            yield f"{checkpoint.name}: {wrong}"


def torment(run: Run, kills: int, rng: random.Random) -> Tally:
    """Kill and resume a run ``kills`` times, then let it complete; return the counts."""
    tally = Tally()
    while tally.kills < kills:
        process = run.start()
        tally.starts += 1
        saving = wait_for_moment(run, process, rng)
        assert saving is not None, f"the run ended after {tally.kills} kills: {run.folder / 'output.log'}"
        started = kill(process, tally, rng)
        process.wait(LEAVING_S)
        tally.orphans += orphans(started)
        tally.kills += 1
        tally.in_a_save += saving
        tally.unreadable += unreadable(run)
        print(f"{run.layout}: kill {tally.kills} of {kills}, step {run.logged()[1]}", flush=True)
    assert run.start().wait() == 0, f"the last start failed: {run.folder / 'output.log'}"
    tally.starts += 1
    return tally


def last_tensors(run: Run) -> dict[str, Tensor]:
    return tensors(complete_checkpoints(run.checkpoints)[-1])


def measure(
    layout: str, kills: int, steps: int, seed: int, folder: Path, *, in_background: bool = False
) -> dict[str, object]:
    """Compare a run that is killed with an uninterrupted one, and return the results.

    With ``in_background``, the run that is killed writes its checkpoints in the background.
    """
    alone = Run(folder / "alone", layout, steps)
    tormented = Run(folder / "tormented", layout, steps, in_background=in_background)
    for run in (alone, tormented):
        run.folder.mkdir(parents=True)
    assert alone.start().wait() == 0, f"it fails by itself: {alone.folder / 'output.log'}"
    tally = torment(tormented, kills, random.Random(seed))
    ours, theirs = last_tensors(tormented), last_tensors(alone)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    return {"layout": layout, "async_save": in_background, **asdict(tally), "bitwise": same}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_injection", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of all runs together")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    runs = list(itertools.product(LAYOUTS, (False, True)))
    kills = math.ceil(asked.kills / len(runs))
    found = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        for layout, in_background in runs:
            name = f"{layout}{' async_save' * in_background}"
            where = Path(scratch, name.replace(" ", "_"))
            steps = STEPS_A_KILL * kills
            found[name] = measure(layout, kills, steps, asked.seed, where, in_background=in_background)
            print(" ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
    about = report("benchmarks.fault_injection", arguments, "2 ranks on the CPU, gloo", [], {})
    facts = {key: about[key] for key in ("command", "date", "device", "versions")}
    results = json.dumps(facts | {"runs": found}, indent=2)
    (RESULTS / "fault_injection.json").write_text(results + "\n")
    if not all(row["bitwise"] and not row["orphans"] and not row["unreadable"] for row in found.values()):
        sys.exit("a run did not survive")


if __name__ == "__main__":
    main(sys.argv[1:])
