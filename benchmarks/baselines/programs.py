"""The programs that are compared, their commands, and the work items."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.baselines.arguments import LEARNING_RATES, MAX_LENGTH, ROWS

OURS, LOOP = "ours", "loop"


@dataclass(frozen=True)
class Work:
    stage: str
    dtype: str
    share_prompt: bool = False
    """Whether the prompt of a dpo pair is computed only once; then only programs that can do so are run."""

    @property
    def name(self) -> str:
        return "-".join([self.stage, self.dtype, *(["shared"] if self.share_prompt else [])])


WORKS = (
    Work("sft", "fp32"),
    Work("sft", "bf16"),
    Work("pt", "fp32"),
    Work("pt", "bf16"),
    Work("dpo", "fp32"),
    Work("dpo", "bf16"),
    Work("dpo", "fp32", share_prompt=True),
    Work("dpo", "bf16", share_prompt=True),
)


@dataclass(frozen=True)
class Case:
    """One work item with its files."""

    work: Work
    data: Path
    """Folder made by ``samples``."""
    order: Path | None
    """File with the samples of each step of this runner. None means that each program chooses its samples."""
    steps: int


@dataclass(frozen=True)
class Program:
    """A module of this package that is run with the options of ``arguments`` by its own Python."""

    name: str
    stages: tuple[str, ...]
    packages: tuple[str, ...]
    """Packages whose versions are recorded. The first one is required."""
    module: str = ""
    python: str | None = None
    """Path of the Python interpreter. None means that it was not given."""
    compile: bool = False
    shares_prompts: bool = False

    def does(self, work: Work) -> bool:
        return work.stage in self.stages and (self.shares_prompts or not work.share_prompt)

    def command(self, case: Case, output: Path) -> list[str]:
        assert self.python is not None
        work = case.work
        command = [self.python, "-m", f"benchmarks.baselines.{self.module}", f"--data={case.data}"]
        command += [f"--stage={work.stage}", f"--dtype={work.dtype}", f"--steps={case.steps}"]
        command += [f"--output={output}"]
        command += ["--compile"] if self.compile else []
        command += ["--share-prompt"] if work.share_prompt else []
        return command if case.order is None else [*command, f"--order={case.order}"]

    def missing(self) -> str | None:
        """Return a short reason why the program cannot run. None means that it can."""
        peer = self.name.split(",")[0]
        if self.python is None:
            return f"skipped: give --peer {peer}=PYTHON, the Python in which it is installed"
        if not Path(self.python).is_file():
            return f"skipped: there is no {self.python}"
        if self.packages[0] not in self.versions():
            return f"skipped: {self.packages[0]} is not installed in {self.python}"
        return None

    def versions(self) -> dict[str, str]:
        """Return the versions of those ``packages`` that are installed, or {} if there is no Python."""
        if self.python is None or not Path(self.python).is_file():
            return {}
        done = subprocess.run(
            [self.python, "-c", VERSIONS, *self.packages], check=True, capture_output=True, text=True
        )
        return json.loads(done.stdout)


class Ours(Program):
    """This runner by its command line, with an additional logger for events."""

    def command(self, case: Case, output: Path) -> list[str]:
        assert self.python is not None
        more = [f"run.output_dir={output}", "+logger.events._target_=benchmarks.baselines.ours.BenchLogger"]
        more += ["run.compile=true"] if self.compile else []
        return [self.python, "-m", "runner", *overrides(case.work, case.data, case.steps), *more]


@dataclass(frozen=True)
class Other(Program):
    """Any command that writes ``events`` to BENCH_OUT."""

    template: str = ""

    def command(self, case: Case, output: Path) -> list[str]:
        words = {
            "{stage}": case.work.stage,
            "{dtype}": case.work.dtype,
            "{shared}": "--shared" if case.work.share_prompt else "",
            "{data}": str(case.data),
            "{order}": "" if case.order is None else f"--order {case.order}",
            "{steps}": str(case.steps),
            "{output}": str(output),
        }
        line = self.template
        for word, value in words.items():
            line = line.replace(word, value)
        return shlex.split(line)

    def missing(self) -> None:
        """Return None, because this cannot be checked."""

    def versions(self) -> dict[str, str]:
        return {}


def overrides(work: Work, data: Path, steps: int) -> list[str]:
    """Return the options of this runner with which a step is the same work as in the other programs."""
    file = {"sft": "sft_messages", "pt": "pt", "dpo": "dpo_trl"}[work.stage]
    rows = ROWS // 2 if work.stage == "dpo" else ROWS  # a row of pairs has twice the length
    options = [
        f"stage={work.stage}",
        f"run.dtype={work.dtype}",
        "model=hf",
        f"model.path={data / 'model_small'}",
        "data=files",
        f"data.train={data / file}.json",
        f"data.max_length={MAX_LENGTH}",
        "scheduler=constant",
        f"optimizer.lr={LEARNING_RATES[work.stage]}",
        "optimizer.weight_decay=0",
        f"run.max_steps={steps}",
        f"run.global_batch_size={rows}",
        f"run.micro_batch_size={rows}",
        "run.device=cpu",
        "run.export=false",
        "checkpoint.model_only=true",
        "run.final_sample_tokens=0",
    ]
    return [*options, "data.share_prompt=true"] if work.share_prompt else options


def programs(peers: Mapping[str, str], others: Mapping[str, str]) -> list[Program]:
    """Return all programs; the first are this runner and the loop, which use the current Python.

    ``peers`` maps names to paths of a Python, and ``others`` names to commands.
    """
    here, stages = sys.executable, tuple(LEARNING_RATES)
    own = ("torch", "transformers", "tokenizers")
    ours = [
        Ours(OURS, stages, own, python=here, shares_prompts=True),
        Ours(f"{OURS}, compiled", ("pt",), own, python=here, compile=True),
        Program(LOOP, stages, own, "loop", here, shares_prompts=True),
        Program(f"{LOOP}, compiled", ("pt",), own, "loop", here, compile=True),
    ]
    theirs = [replace(program, python=peers.get(program.name.split(",")[0])) for program in PEERS]
    more = [Other(name, stages, (), shares_prompts="{shared}" in t, template=t) for name, t in others.items()]
    return [*ours, *more, *theirs]


PEERS = (
    Program("trl", ("sft", "dpo"), ("trl", "torch", "transformers"), "in_trl"),
    Program(
        "llamafactory", ("sft", "pt", "dpo"), ("llamafactory", "torch", "transformers"), "in_llamafactory"
    ),
    Program("hf", ("pt",), ("transformers", "torch", "accelerate"), "in_hf_trainer"),
    Program("litgpt", ("pt",), ("litgpt", "torch"), "in_litgpt"),
    Program("litgpt, compiled", ("pt",), ("litgpt", "torch"), "in_litgpt", compile=True),
    Program("axolotl", ("sft",), ("axolotl", "torch", "transformers"), "in_axolotl"),
)

VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
"""Code that prints the versions of packages as a JSON object, for a Python without this project."""
