"""Checks and estimates of a run before a process is spawned or a process group is created."""

from components.preflight.checks import (
    check_adapter,
    check_batch,
    check_early_stop,
    check_evaluate_only,
    check_evaluation,
    check_forecast,
    check_head_dim,
    check_length,
    check_model_fits_data,
    check_modes,
    check_mtp_stage,
    check_normalisation,
    check_profile,
    check_ranks,
    check_rehearsed_rank,
    check_restarts,
    check_shared_name,
    check_shared_prompt,
    check_start,
    check_stream,
    next_batch,
    resolve_device,
    steps_done,
)
from components.preflight.engine_layouts import known_parts
from components.preflight.estimates.device_specs import Device, find_device
from components.preflight.eval_metrics import check_watched_metric, check_watched_set
from components.preflight.forecast_report import Report, survey
from components.preflight.search.candidate import Candidate
from components.preflight.search.memory_advice import check_fits

__all__ = [
    "Candidate",
    "Device",
    "Report",
    "check_adapter",
    "check_batch",
    "check_early_stop",
    "check_evaluate_only",
    "check_evaluation",
    "check_fits",
    "check_forecast",
    "check_head_dim",
    "check_length",
    "check_model_fits_data",
    "check_modes",
    "check_mtp_stage",
    "check_normalisation",
    "check_profile",
    "check_ranks",
    "check_rehearsed_rank",
    "check_restarts",
    "check_shared_name",
    "check_shared_prompt",
    "check_start",
    "check_stream",
    "check_watched_metric",
    "check_watched_set",
    "find_device",
    "known_parts",
    "next_batch",
    "resolve_device",
    "steps_done",
    "survey",
]
