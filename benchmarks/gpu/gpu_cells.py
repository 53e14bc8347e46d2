"""The cells of ``python -m benchmarks.gpu``: the measurements, and the time that each may take."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch

from components.engines.megatron.te_install import has_transformer_engine
from tests.e2e.commands import SMALL, write_chats

ROOT = Path(__file__).parents[2]
Facts = dict[str, Any]
Installed = Callable[[], bool]


class Failed(Exception):
    """A cell that failed or took too long, with the last lines of its output."""


@dataclass(frozen=True)
class Place:
    """The device and the folder for files of one call of the benchmark."""

    device: Literal["cpu", "cuda"]
    folder: Path


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    measure: Callable[[Place, float], Facts]
    """Function of the place and of a time limit in seconds, which raises Failed if it fails."""
    seconds: float
    """Time limit in seconds."""
    needs: Mapping[str, Installed]
    """Optional packages by name, each with a function that returns whether it is installed."""

    def missing(self) -> str | None:
        lacking = [name for name, installed in self.needs.items() if not installed()]
        return f"{', '.join(lacking)} not installed" if lacking else None


# ---- curves

CURVE = ("run.export=false", "optimizer.lr=1e-5", "run.max_steps=8", "run.eval_every=0", "stage=sft")
ENGINES = {
    "fsdp2": ("parallelism=single", "run.kernels=torch"),
    "megatron": ("parallelism=megatron", "parallelism.transformer_impl=local"),
}


def curves(layout: Sequence[str], dtype: str, place: Place, seconds: float) -> Facts:
    """Return the largest relative differences between the curves of the device and of the CPU."""
    options = (*SMALL, *CURVE, *layout, *few_data(place), f"run.dtype={dtype}")
    with ThreadPoolExecutor() as both:
        here, there = both.map(partial(curve, options, place, seconds=seconds), ("cpu", place.device))
    found = {}
    for key in ("train/loss", "train/grad_norm"):
        pairs = [(a[key], b[key]) for a, b in zip(here, there, strict=True)]
        found[f"largest difference of {key}"] = max(abs(a - b) / abs(a) for a, b in pairs)
    return found | {"loss on the CPU": here[-1]["train/loss"], "loss": there[-1]["train/loss"]}


def curve(options: Sequence[str], place: Place, device: str, *, seconds: float) -> list[Facts]:
    """Run the command on ``device`` and return the rows of its steps."""
    folder = mkdtemp(dir=place.folder)
    command = [sys.executable, "-m", "runner", *options, f"run.device={device}", f"run.output_dir={folder}"]
    output(command, place, seconds, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
    return [row for row in map(json.loads, metrics.read_text().splitlines()) if "train/loss" in row]


# ---- speed

SPEED = (
    "stage=sft",
    "run.dtype=bf16",
    "run.global_batch_size=4",
    "run.micro_batch_size=1",
    "run.max_steps=16",
)
TOGETHER = "run.micro_batch_size=4"
BY_TE = ("parallelism=megatron", "parallelism.transformer_impl=transformer_engine", TOGETHER)
TWICE = ("run.micro_batch_size=8", "run.global_batch_size=8")
OURS: Mapping[str, tuple[str, ...]] = {
    "fsdp2 eager": ENGINES["fsdp2"],
    "fsdp2 compiled": (*ENGINES["fsdp2"], "run.compile=true"),
    "fsdp2 compiled, 4 rows": (*ENGINES["fsdp2"], "run.compile=true", TOGETHER),
    "fsdp2 compiled, 8 rows": (*ENGINES["fsdp2"], "run.compile=true", *TWICE),
    "fsdp2 liger": ("parallelism=single", "run.kernels=liger"),
    "megatron local": ENGINES["megatron"],
    "megatron local, 4 rows": (*ENGINES["megatron"], TOGETHER),
    "megatron te, 4 rows": BY_TE,
    "megatron te fp8, 4 rows": (*BY_TE, "run.dtype=fp8"),
}
PEERS = {"transformers loop": "loop", "hf trainer": "hf", "trl": "trl"}


def module(name: str) -> Mapping[str, Installed]:
    return {name: lambda: find_spec(name) is not None}


INSTALLED_TE: Mapping[str, Installed] = {"transformer-engine for torch": has_transformer_engine}
NEEDS: Mapping[str, Mapping[str, Installed]] = {
    "fsdp2 liger": module("liger_kernel"),
    "megatron te, 4 rows": INSTALLED_TE,
    "megatron te fp8, 4 rows": INSTALLED_TE,
    "hf trainer": module("accelerate"),
    "trl": module("trl"),
}


def our_speed(options: Sequence[str], place: Place, seconds: float) -> Facts:
    """Return the ``speed`` of this program, and on a GPU the peak of a rehearsal on its host."""
    if place.device == "cpu":
        return speed("ours", options, place, seconds)
    with ThreadPoolExecutor() as both:
        rehearsed = both.submit(rehearsed_peak, options, place, seconds)
        return speed("ours", options, place, seconds) | rehearsed.result()


def rehearsed_peak(options: Sequence[str], place: Place, seconds: float) -> Facts:
    """Return the peak memory of a rehearsal's steps in GiB, or the reason if the rehearsal failed."""
    folder = mkdtemp(dir=place.folder)
    words = (*SPEED, *options, "preflight.mode=rehearse", f"run.output_dir={folder}")
    try:
        output([sys.executable, "-m", "runner", *words], place, seconds)
    except Failed as failed:
        return {"no rehearsal": failed.args[0]}
    (record,) = Path(folder).glob("preflight/*/rehearsal.json")
    moments: dict[str, int] = json.loads(record.read_text())["memory"]["by_moment"]
    peak = max(bytes_held for moment, bytes_held in moments.items() if moment != "build")
    return {"rehearsed_peak_gib": round(peak / 2**30, 2)}


def speed(program: str, options: Sequence[str], place: Place, seconds: float) -> Facts:
    """Return speed, MFU and peak memory of one program."""
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_speed", "--device", place.device, program]
    printed = output([*command, *SPEED, *options, f"run.device={place.device}"], place, seconds)
    facts: Facts = json.loads(printed.splitlines()[-1])
    return facts


def shapes(place: Place) -> dict[str, tuple[str, ...]]:
    """Return the options of each model and its data.

    The 8B model has only as many layers, from 1 to 8, as fit into half of the GPU's memory. Rows of 4096
    tokens are filled with conversations of 20 to 750 tokens. On a CPU, the model and its data are tiny, which
    is enough to check that the programs run.
    """
    if place.device == "cpu":
        return {"tiny": (*SMALL[:6], *few_data(place), "data.max_length=128", "run.max_steps=6")}
    # Embedding and head, and one layer, with 18 bytes a parameter.
    ends, layer = 18 * 2 * 128256 * 4096, 18 * 218e6
    layers = int((torch.cuda.get_device_properties(0).total_memory / 2 - ends) / layer)
    cut = f"model.architecture.num_hidden_layers={min(max(layers, 1), 8)}"
    chats, lengths = place.folder / "long_chats.jsonl", random.Random(0)
    records = [
        {"instruction": "Repeat.", "output": "one more " * lengths.randint(4, 360)} for _ in range(700)
    ]
    chats.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    long = ("data=files", f"data.train={chats}", "data.max_length=4096")
    return {"llama3_1b": ("model=llama3_1b", *long), "llama3_8b, cut": ("model=llama3_8b", cut, *long)}


def few_data(place: Place) -> tuple[str, ...]:
    """Return the options of a small data set, which is tokenised quickly."""
    chats = place.folder / "chats.jsonl"
    write_chats(chats)
    return "data=files", f"data.train={chats}"


# ---- tests

MEMORY_TESTS = "tests/gpu/test_memory_cuda.py"
"""Tests that fill the memory of the GPU and therefore run one at a time."""


def tests(arguments: Sequence[str], place: Place, seconds: float) -> Facts:
    """Return the numbers of tests by outcome; after a timeout, of those that have ended."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-v", *arguments]
    log = place.folder / "tests.log"
    try:
        log.write_text(output(command, place, seconds))
    except Failed as failed:
        log.write_text(str(failed.args[1]))
    printed = log.read_text()
    found = {word: outcome(printed, word) for word in ("PASSED", "FAILED", "SKIPPED", "ERROR")}
    numbers = {word.lower(): len(names) for word, names in found.items()}
    last = (printed.strip() or "no output").splitlines()[-1]
    return numbers | {"tests that failed": sorted(found["FAILED"] | found["ERROR"]), "last line": last}


def outcome(printed: str, word: str) -> set[str]:
    """Return the tests with the outcome ``word`` in the output of ``pytest -v``, with or without xdist."""
    lines = (line for line in printed.splitlines() if word in line and "tests/gpu/" in line)
    return {re.sub(rf"\[gw\d+\]|\[ *\d+%\]| - .*|{word}", "", line).strip() for line in lines}


# ---- all


def cells(place: Place) -> list[Cell]:
    """Return all cells in the order in which they are measured."""
    several = ("-n", "6") if find_spec("xdist") else ()
    runs = partial(tests, (*several, "tests/gpu", f"--ignore={MEMORY_TESTS}"))
    found = [  # the tests first, because the call may have no time left for the last cells
        Cell("tests/gpu", runs, 600, module("pytest")),
        Cell(MEMORY_TESTS, partial(tests, (MEMORY_TESTS,)), 300, module("pytest")),
    ]
    found += [
        Cell(f"curve of {engine} {dtype}", partial(curves, layout, dtype), 90, {})
        for engine, layout in ENGINES.items()
        for dtype in ("fp32", "bf16")
    ]
    for name, shape in shapes(place).items():
        for ours, layout in OURS.items():
            measure = partial(our_speed, (*shape, *layout))
            found.append(Cell(f"{name}: {ours}", measure, 120, NEEDS.get(ours, {})))
        for peer, program in PEERS.items():
            found.append(Cell(f"{name}: {peer}", partial(speed, program, shape), 90, NEEDS.get(peer, {})))
    return found


def output(command: Sequence[str], place: Place, seconds: float, environ: Mapping[str, str] = {}) -> str:
    """Return what the command prints; end it and all its processes after ``seconds``.

    Raises:
        Failed: if the command takes too long or fails.
    """
    own = {"RUNNER_CACHE": str(place.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | own | environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        raise Failed(f"not over after {seconds:.0f} s", printed) from None
    if process.returncode:
        lines = (errors.strip() or printed.strip() or "no message").splitlines()
        raise Failed(f"exit {process.returncode}: {' | '.join(lines[-3:])}", printed)
    return printed
