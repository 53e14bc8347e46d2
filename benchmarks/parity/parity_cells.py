"""One cell of a parity table: a run with the code of all runs, and its errors against the reference."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.compose import composed
from benchmarks.parity import parity_ranks
from benchmarks.parity.parity_rows import DENSE, EXPERIMENT, REFERENCE, Column, Row, Table
from components.adapters import export_adapter
from components.contracts.data import SampleKind
from components.data.demo import stdlib_records
from components.data.records.samples import ChatSample, PreferenceSample, Sample, TextSample, UnpairedSample
from components.proof.verdict import BOUND, curve_error, relative_error
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from runner.launch.prepare import prepare
from runner.records.run_dir import read_run_config
from runner.records.run_record import RunRecord
from tests.ranks import Ranks


@dataclass(frozen=True)
class Measured:
    """Results of a run."""

    gradients: dict[str, Tensor]
    losses: Tensor
    grad_norms: Tensor
    world_size: int
    mesh: dict[str, int]
    """Mesh dimensions other than 1 from run.json."""
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Relative errors against the reference."""

    gradient: float
    """Error of the worst parameter in the first step, before clipping: the norm of the difference divided by
    the norm of the reference."""
    parameter: str
    loss: float
    grad_norm: float
    seconds: float
    bounds: tuple[float, float, float] = (BOUND, BOUND, BOUND)
    """See ``Column.bounds``."""

    @property
    def passes(self) -> bool:
        errors = zip((self.gradient, self.loss, self.grad_norm), self.bounds, strict=True)
        return all(error <= bound for error, bound in errors)  # NaN fails


class Bench:
    """The measurement of the cells of a table, with all files and run folders under ``root``."""

    def __init__(self, root: Path, table: Table = DENSE) -> None:
        self.root, self.table = root, table
        self.references: dict[str, Measured] = {}
        for kind in ("text", "chat", "preference", "unpaired"):
            write_samples(kind, root / f"{kind}.jsonl")
        for stage in {column.stage for column in table.columns if column.adapted}:
            write_adapter(root / f"adapter_{stage}", (*table.experiment, f"stage={stage}"))

    def cell(self, row: Row, column: Column) -> tuple[Cell, Measured]:
        """Train ``row`` on ``column``; return the errors and the results.

        The reference of the column is trained first, unless it has been.
        """
        if column.name not in self.references:
            self.references[column.name] = self.measure(REFERENCE, column)
        found = self.measure(row, column)
        return replace(compare(found, self.references[column.name]), bounds=column.bounds), found

    def measure(self, row: Row, column: Column) -> Measured:
        began = time.perf_counter()
        pool = Ranks(row.world_size, megatron=True)
        folder = self.prepare(row, column)
        clipped = pool.run(parity_ranks.train, folder, row.fault)[0]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        facts = RunRecord.read(folder).to_json()
        mesh = check_mesh(row, facts)
        losses, norms = (
            torch.tensor([r[f"train/{key}"] for r in rows], dtype=torch.float64)
            for key in ("loss", "grad_norm")
        )
        # Clipping hides a factor that all gradients have in common.
        most = read_run_config(folder)["optimizer"]["max_grad_norm"]
        factor = max(1.0, float(norms[0]) / most)
        gradients = {name: gradient * factor for name, gradient in clipped.items()}
        return Measured(gradients, losses, norms, facts["world_size"], mesh, time.perf_counter() - began)

    def prepare(self, row: Row, column: Column) -> Path:
        """Create the run folder as the command line does before it starts ranks."""
        launch = check_launch(
            self.config(row, column), ConfigSources(), command=row.overrides + column.overrides
        )
        assert launch.world_size == row.world_size, f"{row.name}: {launch.world_size} ranks"
        return prepare(replace(launch, console=Console(quiet=True)))

    def config(self, row: Row, column: Column) -> dict[str, Any]:
        here = (
            "run.name=parity",
            f"run.output_dir={self.root}/runs",
            f"data.train={self.root}/{column.data}.jsonl",
            f"data.cache_dir={self.root}/cache",
            "data.num_workers=1",
        )
        path = f"{self.root}/adapter_{column.stage}"
        adapter = ("adapter=lora", f"adapter.path={path}") if column.adapted else ()
        return composed([*self.table.experiment, *column.overrides, *row.overrides, *here, *adapter])


def check_mesh(row: Row, facts: dict[str, Any]) -> dict[str, int]:
    """Return the mesh in run.json without dimensions of 1, and assert that it is that of ``row``."""
    mesh = {name: size for name, size in facts["mesh"]["dims"].items() if size > 1}
    chunks = facts.get("chunks_per_stage", 1)
    assert (facts["engine"], facts["world_size"], mesh, chunks) == (
        row.engine,
        row.world_size,
        dict(row.dims or {}),
        row.chunks,
    ), f"{row.name}: the run was {facts['engine']} on {facts['world_size']} ranks, {mesh}, {chunks} chunks"
    return mesh


def compare(found: Measured, reference: Measured) -> Cell:
    assert found.gradients.keys() == reference.gradients.keys()
    names = list(reference.gradients)
    errors = torch.stack([relative_error(found.gradients[name], reference.gradients[name]) for name in names])
    worst = int(errors.argmax())
    return Cell(
        gradient=errors[worst].item(),
        parameter=names[worst],
        loss=curve_error(found.losses, reference.losses),
        grad_norm=curve_error(found.grad_norms, reference.grad_norms),
        seconds=found.seconds,
    )


# ---- data


def write_samples(kind: SampleKind, path: Path, count: int = 240) -> None:
    """Write the first short samples of the embedded data, or the first documents of any length."""
    samples = (sample for sample, _ in stdlib_records(kind, "train"))
    short = (sample for sample in samples if isinstance(sample, TextSample) or length(sample) < 400)
    lines = [json.dumps(record(sample)) for sample in islice(short, 20 if kind == "text" else count)]
    path.write_text("\n".join(lines) + "\n")


FIELDS = ("text", "messages", "prompt", "chosen", "rejected", "tools")


def record(sample: Sample) -> dict[str, Any]:
    """Return a sample in the format of data files."""
    if isinstance(sample, UnpairedSample):
        return {"prompt": sample.prompt, "completion": sample.completion, "label": sample.desirable}
    return {name: value for name, value in vars(sample).items() if name in FIELDS}


def length(sample: Sample) -> int:
    """Return the number of characters of all messages; of a pair, only the longer side counts."""
    if isinstance(sample, ChatSample):
        return characters(sample.messages)
    if isinstance(sample, UnpairedSample):
        return characters(sample.prompt) + characters(sample.completion)
    assert isinstance(sample, PreferenceSample)
    return characters(sample.prompt) + max(characters(sample.chosen), characters(sample.rejected))


def write_adapter(path: Path, chosen: Sequence[str] = EXPERIMENT) -> None:
    """Write an adapter with nonzero matrices for the model of the experiment ``chosen``."""
    config = composed([*chosen, "data=demo", "adapter=lora", "adapter.r=4", "run.name=adapter"])
    experiment = build_experiment(config, ConfigSources())
    shapes = experiment.adapter.shapes(experiment.model.build(experiment.model.config()))
    torch.manual_seed(0)
    tensors = ((name, 0.03 * torch.randn(shape)) for name, shape in shapes.items())
    export_adapter(experiment.adapter, experiment.model, tensors, path)


def characters(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)
