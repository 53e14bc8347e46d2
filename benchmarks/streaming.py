"""A stream of 2 GB of compressed records: ``python -m benchmarks.streaming [--gigabytes 2] [--steps 200]``.

The memory of all processes of a run of two ranks is sampled while it reads every record. A second run is
killed by SIGKILL in the middle and resumed from its checkpoint, on its own layout and on one of the other
engine, and the curves are compared with that of the uninterrupted run. Most of a record is a field that no
stage reads, so that the stream is read in minutes; its text has about 50 tokens.
"""

import argparse
import base64
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.fault_injection import GONE_S, SMALL, START_S, orphans
from benchmarks.throughput import RESULTS, report
from components.checkpoint.folder import complete_checkpoints

LAYOUT, OTHER = "fsdp2", "megatron_dp2"
FILES = 32
UNREAD = 65536
"""Number of random bytes in a record's unread field, which are encoded as base64."""
BUFFER, ROWS = 500, 64
"""Number of records in a chunk, and of rows in a global batch."""
PERIOD_S = 1.0
"""Time in seconds between two samples of memory."""
FLAT = 1.05
"""Largest peak of the last quarter of the run, as a multiple of the second quarter's peak."""


def write_source(folder: Path, size: int) -> int:
    """Write gzip files with about ``size`` bytes in total, and return the number of their records."""
    rng = random.Random(0)
    words = [first + second for first in ("ta", "no", "ri", "sel") for second in ("ma", "ken", "lo", "der")]
    count = 0
    for file in range(FILES):
        path = folder / f"{file:02}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as lines:
            while path.stat().st_size < size // FILES:
                text = " ".join(rng.choices(words, k=rng.randrange(10, 30)))
                unread = base64.b64encode(rng.randbytes(UNREAD)).decode()
                lines.write(json.dumps({"text": text, "unread": unread}) + "\n")
                count += 1
    return count


def start(source: Path, folder: Path, steps: int, *options: str) -> "subprocess.Popen[bytes]":
    """Start a run with its folders and its output.log in ``folder``."""
    folder.mkdir()
    command = [sys.executable, "-m", "runner", *SMALL, "parallelism.dp=2", "data=files"]
    command += [f"data.train={source}/*.jsonl.gz", "data.streaming=true", f"data.buffer_size={BUFFER}"]
    command += ["data.num_workers=1"]  # more tokenising processes would start in the middle of the run
    command += [f"run.max_steps={steps}", f"run.global_batch_size={ROWS}", "run.micro_batch_size=16"]
    command += [f"checkpoint.save_every={steps // 2}", f"run.output_dir={folder}", *options]
    with (folder / "output.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", folder: Path) -> Path:
    """Wait for the end of a run that must succeed, and return its run folder."""
    assert process.wait() == 0, f"the run failed: {folder / 'output.log'}"
    return run_folder(folder)


def run_folder(folder: Path) -> Path:
    return max(folder.glob("chaos/*"), default=folder / "none")


def memory(process: "subprocess.Popen[bytes]") -> int:
    """Return the memory of a run and its processes in bytes, in which a shared page counts once (Pss).

    0 means that a process was about to end.
    """
    total = 0
    try:
        parent = psutil.Process(process.pid)
        for one in (parent, *parent.children(recursive=True)):
            total += one.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # a process that is about to end
        return 0
    return total


def sample_memory(process: "subprocess.Popen[bytes]", folder: Path) -> list[int]:
    """Return the memory in bytes for each second from the first logged step to the end of a run."""
    samples: list[int] = []
    while process.poll() is None:
        if curve(run_folder(folder)):
            samples.append(memory(process))
        time.sleep(PERIOD_S)
    return samples


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of the logged steps of a run."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows if "train/loss" in row]


def killed_at_its_checkpoint(source: Path, folder: Path, steps: int) -> Path:
    """Kill a run as soon as its first checkpoint is complete, and return that checkpoint."""
    process = start(source, folder, steps, f"parallelism={LAYOUT}")
    deadline = time.monotonic() + START_S + steps * PERIOD_S * 10
    while not (saved := complete_checkpoints(run_folder(folder) / "checkpoints")):
        assert process.poll() is None, f"the run ended: {folder / 'output.log'}"
        assert time.monotonic() < deadline, f"no checkpoint: {folder / 'output.log'}"
        time.sleep(0.1)
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not orphans(everything, GONE_S), "a process outlived its parent"
    return saved[0]


def measure(size: int, steps: int, folder: Path) -> dict[str, object]:
    """Train a whole run, kill and resume another one, and return how far the curves are apart."""
    source = folder / "source"
    source.mkdir()
    records = write_source(source, size)
    print(f"{records:,} records, {sum(path.stat().st_size for path in source.iterdir()):,} bytes", flush=True)
    process = start(source, folder / "whole", steps, f"parallelism={LAYOUT}")
    samples = [taken for taken in sample_memory(process, folder / "whole") if taken]
    whole = finish(process, folder / "whole")
    expected = curve(whole)
    state = json.loads((complete_checkpoints(whole / "checkpoints")[-1] / "meta.json").read_text())["state"]
    quarter = len(samples) // 4
    found: dict[str, object] = {
        "records": records,
        "bytes": sum(path.stat().st_size for path in source.iterdir()),
        "records_trained_on": state["stream_position"][0] * BUFFER,
        "seconds_of_training": len(samples) * PERIOD_S,
        "peak_mib_by_quarter": [
            max(samples[part * quarter : (part + 1) * quarter]) // 2**20 for part in range(4)
        ],
    }
    print(found, flush=True)
    checkpoint = killed_at_its_checkpoint(source, folder / "killed", steps)
    for layout in (LAYOUT, OTHER):
        where = folder / layout
        options = (f"parallelism={layout}", f"checkpoint.resume={checkpoint}")
        resumed = curve(finish(start(source, where, steps, *options), where))
        left = [row for row in expected if row[0] >= resumed[0][0]]
        assert [row[0] for row in left] == [row[0] for row in resumed]
        apart = max(abs(a[1] - b[1]) / b[1] for a, b in zip(resumed, left, strict=True))
        found[layout] = {"steps": len(resumed), "bitwise": resumed == left, "relative_difference": apart}
        print(layout, found[layout], flush=True)
    return found


def holds(found: dict[str, object]) -> bool:
    """Return whether all records were read in constant memory, and the resumed runs have the same curve."""
    peaks, same, other = found["peak_mib_by_quarter"], found[LAYOUT], found[OTHER]
    assert isinstance(peaks, list)
    assert isinstance(same, dict)
    assert isinstance(other, dict)
    read = found["records_trained_on"] >= found["records"]  # type: ignore[operator]
    flat = peaks[3] <= FLAT * peaks[1]
    return read and flat and same["bitwise"] and other["relative_difference"] <= 1e-5


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stream-") as scratch:
        found = measure(int(asked.gigabytes * 1e9), asked.steps, Path(scratch))
    about = report("benchmarks.streaming", arguments, "2 ranks on the CPU, gloo", [], {})
    facts = {key: about[key] for key in ("command", "date", "device", "versions")}
    (RESULTS / "streaming.json").write_text(json.dumps(facts | found, indent=2) + "\n")
    if not holds(found):
        sys.exit("memory grew, or a resumed run has another curve")


if __name__ == "__main__":
    main(sys.argv[1:])
