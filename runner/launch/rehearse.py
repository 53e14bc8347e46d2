"""``preflight.mode=rehearse``: steps of one rank's engine on fake CUDA tensors, in another process."""

import json
import math
import subprocess
from pathlib import Path

from components.atomic_write import write_atomic
from components.contracts.errors import ConfigError, TrainingError
from components.contracts.json_types import Json
from components.preflight.checks import check_steps
from components.preflight.engine_layouts import mesh_info
from components.preflight.forecast_report import Report, survey
from components.preflight.formatting import as_size
from components.preflight.search.candidate import Candidate
from components.preflight.search.memory_advice import check_fits
from components.rehearsal.device_guard import build_guard
from components.rehearsal.tables import rehearsal_report
from runner.launch.checks import PreparedRun, RunPreparation
from runner.search_path import python_module


def print_rehearsal(launch: RunPreparation, found: PreparedRun) -> float:
    """Rehearse one rank, and print and save the record; return NaN, because there is no loss.

    Raises:
        ConfigError: if the rank needs more memory than its device has, the machine has no C++ compiler, or
            the run has fewer steps than the rehearsal.
        TrainingError: if the engine fails in the rehearsal, or would fail in a kernel.
    """
    case, experiment = found.candidate, launch.experiment
    assert case is not None, "preflight.check_forecast has refused it"
    ahead, console = experiment.preflight, launch.console
    check_steps(ahead.num_steps, found.data.num_steps)
    stage = stages(case)
    rank = stage.index(case.peak.stage) if ahead.rank is None else ahead.rank
    library = build_guard(experiment.data.cache() / "rehearsal")
    folder = launch.preflight_folder()
    request = {
        "rank": rank,
        "world_size": case.world_size,
        "steps": ahead.num_steps,
        "gpu": {"name": case.device.name, "memory": case.device.memory},
        "data": found.data.to_json(),
    }
    record = run_rehearsal(folder, library, request)
    report = rehearsal_report(case, stage[rank], record, ahead.num_steps)
    forecast = survey(case, launch.config)
    write_atomic(folder / "preflight.json", Report({**forecast.sections, **report.sections}, {}).to_json())
    console.print(
        found.data.audit.render(), forecast.render(), report.render_all(), report.render(), sep="\n"
    )
    console.print(f"preflight folder: {folder}", soft_wrap=True, highlight=False)
    if record["violations"]:
        raise TrainingError(f"rank {rank} would fail on a GPU: {record['violations'][0]}.")
    if record["memory"]["peak"] > case.device.memory:
        check_fits(case)
        raise ConfigError(
            f"preflight.device_memory: rank {rank} needs {as_size(record['memory']['peak'])} of "
            f"{as_size(case.device.memory)}; the table above says which lines hold it."
        )
    return math.nan


def run_rehearsal(folder: Path, library: Path, request: Json) -> Json:
    """Run the rehearsal in a process of its own and return its record.

    Raises:
        TrainingError: if the process fails.
    """
    (folder / "request.json").write_text(json.dumps(request, indent=1) + "\n")
    command = [*python_module("runner.launch.rehearsal_main"), str(folder), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainingError(f"the rehearsal of rank {request['rank']} failed:\n{done.stderr.strip()}")
    return json.loads((folder / "rehearsal.json").read_text())


def stages(case: Candidate) -> list[int]:
    """Return the pipeline stage of every rank, 0 without pipelining; pp is the outermost dimension."""
    pp = mesh_info(case.layout, case.world_size)["dims"].get("pp", 1)
    return [rank * pp // case.world_size for rank in range(case.world_size)]
