"""What can be known of a run before a process is spawned or a group is made: checks, sizes, a forecast."""

from components.preflight.case import Case
from components.preflight.checks import (
    check_adapter,
    check_batch,
    check_early_stop,
    check_forecast,
    check_further_tokens,
    check_length,
    check_model_fits_data,
    check_modes,
    check_normalisation,
    check_profile,
    check_ranks,
    check_restarts,
    check_shared_name,
    check_shared_prompt,
    check_start,
    next_batch,
    owes_evaluation,
    resolve_device,
    steps_done,
)
from components.preflight.device import Device, find_device
from components.preflight.engine_layouts import EngineLayout
from components.preflight.misfit import check_fits
from components.preflight.report import Report, survey

__all__ = [
    "Case",
    "Device",
    "EngineLayout",
    "Report",
    "check_adapter",
    "check_batch",
    "check_early_stop",
    "check_fits",
    "check_forecast",
    "check_further_tokens",
    "check_length",
    "check_model_fits_data",
    "check_modes",
    "check_normalisation",
    "check_profile",
    "check_ranks",
    "check_restarts",
    "check_shared_name",
    "check_shared_prompt",
    "check_start",
    "find_device",
    "next_batch",
    "owes_evaluation",
    "resolve_device",
    "steps_done",
    "survey",
]
