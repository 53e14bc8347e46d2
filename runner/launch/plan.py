"""Estimates of a run before it starts. With ``preflight.mode=only`` and ``plan`` no run follows."""

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn

from components import preflight
from components.checkpoint import RunIdentity
from components.contracts.configs import Prepared
from components.contracts.device import DeviceKind
from components.contracts.json_types import Config
from components.preflight.search.layout_search import plan
from components.reference.source import ReferenceSource
from runner.config.instantiate import Experiment
from runner.launch.run_dir import create_run_folder, write_config
from runner.sweeps.job_record import SweepJob
from runner.training.rank import DTYPES


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed all checks except that of its size."""

    data: Prepared
    identity: RunIdentity
    resume: Path | None
    """The checkpoint to resume from. None means a new run."""
    previous_run_dir: Path | None
    """The run folder of an earlier start of this run, if SLURM has started it again."""
    candidate: preflight.Candidate | None
    """Inputs of the forecast. None means that the layout has no forecast."""


def make_candidate(
    experiment: Experiment,
    reference: ReferenceSource,
    model: nn.Module,
    data: Prepared,
    *,
    world_size: int,
    kind: DeviceKind,
    local_ranks: int,
) -> preflight.Candidate | None:
    """Collect the inputs of the estimates: ``model`` (on the meta device), data, layout and devices.

    None means that there is no forecast, because the layout, optimizer or adapter is the user's own class.
    """
    parts = preflight.known_parts(experiment.parallelism, experiment.optimizer, experiment.adapter)
    if parts is None:
        return None
    layout, optimizer, adapter = parts
    run, dtype, ahead = experiment.run, DTYPES[experiment.run.dtype], experiment.preflight
    device = preflight.find_device(
        kind, ahead.device_name, ahead.device_memory, local_ranks=local_ranks, dtype=dtype
    )
    return preflight.Candidate(
        layout=layout,
        world_size=world_size,
        model=model,
        adapter=adapter,
        optimizer=optimizer,
        loss=experiment.stage,
        reference=reference.engine_mode,
        reference_model=reference.model.meta_model if reference.is_separate_model else None,
        data=data,
        micro_batch_size=run.rows_per_microbatch,
        dtype=dtype,
        device=device,
        compiled=run.compile,
        kernels=run.kernels,
        float8=run.dtype == "fp8",
        max_length=experiment.data.max_length,
        shares_prompts=experiment.data.share_prompt,
    )


def print_forecast(
    found: PreparedRun, config: Config, experiment: Experiment, point: SweepJob | None
) -> float:
    """Print the forecast and write it to a new folder; return NaN, because there is no loss.

    Raises:
        ConfigError: if the run does not fit a known device (after the output), or no layout fits.
    """
    case, console, ahead = found.candidate, Console(), experiment.preflight
    assert case is not None, "preflight.check_forecast has refused it"
    if ahead.mode == "plan":
        report = plan(case, ahead.devices or case.world_size)
    else:
        report = preflight.survey(case, config)
        console.print(found.data.audit.render())
    console.print(report.render_all())
    folder = create_run_folder(experiment.run.output_dir, "preflight")
    if point is not None:
        point.mark_running(folder)
    write_config(folder, config)
    (folder / "preflight.json").write_text(report.to_json())
    console.print(f"preflight folder: {folder}", soft_wrap=True, highlight=False)
    if ahead.mode == "only" and case.device.certain:
        preflight.check_fits(case)
    elif ahead.mode == "only" and not case.fits():
        console.print(
            "It does not fit this machine; preflight.device_name=H100 estimates another.", highlight=False
        )
    return math.nan
