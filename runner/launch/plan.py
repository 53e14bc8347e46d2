"""The forecasts of ``preflight.mode=only`` and ``preflight.mode=plan``, after which no run starts."""

import math

from rich.console import Console

from components.atomic_write import write_atomic
from components.preflight.forecast_report import survey
from components.preflight.search.layout_search import plan
from components.preflight.search.memory_advice import check_fits
from runner.launch.checks import PreparedRun, RunPreparation


def print_forecast(launch: RunPreparation, found: PreparedRun) -> float:
    """Print the forecast and write it to a new folder; return NaN, because there is no loss.

    Raises:
        ConfigError: if the run does not fit into the memory of a known device, which is checked after the
            output, or if no layout fits.
    """
    case, console, ahead = found.candidate, Console(), launch.experiment.preflight
    assert case is not None, "preflight.check_forecast has refused it"
    if ahead.mode == "plan":
        report = plan(case, ahead.devices or case.world_size)
    else:
        report = survey(case, launch.config)
        console.print(found.data.audit.render())
    console.print(report.render_all())
    folder = launch.preflight_folder()
    write_atomic(folder / "preflight.json", report.to_json())
    console.print(f"preflight folder: {folder}", soft_wrap=True, highlight=False)
    evaluates = launch.experiment.run.evaluate_only
    if ahead.mode == "only" and case.device.certain:
        check_fits(case, evaluates=evaluates)
    elif ahead.mode == "only" and not evaluates and case.peak.total > case.memory_budget:
        console.print(
            "It does not fit this machine; preflight.device_name=H100 estimates another.", highlight=False
        )
    return math.nan
