"""The keys that configure the run itself; all others belong to a component.

The comments of conf/config.yaml describe every key.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from components.contracts.device import DeviceKind
from components.contracts.engine import Kernels, LossScaling
from components.contracts.errors import ConfigError, check_at_least_one, check_at_least_zero
from components.proof.small_model import Limits
from components.rounding import whole_steps

MOST_DEVICES = 2**20
"""Largest number of devices for which a layout is searched."""
LARGEST_SCALE = 2.0**127
"""Largest power of 2 in fp32."""


@dataclass(frozen=True)
class RunConfig:
    """``run.*``: length, batches, precision, output and limits of a run."""

    name: str
    output_dir: str
    max_steps: int | None
    epochs: float | None
    global_batch_size: int
    micro_batch_size: int | Literal["auto"]
    """Number of rows. It is ``auto`` until the launch has chosen a number, which the ranks then read."""
    seed: int
    dtype: Literal["fp32", "bf16", "fp8", "fp16"]
    loss_scale: LossScaling
    device: Literal["auto", DeviceKind]
    log_every: float
    """Number of steps, or, if below 1, a share of the run; the last step is logged, too. 0 means never."""
    eval_every: float
    """Number of steps, or, if below 1, a share of the run."""
    eval_every_epochs: int
    eval_on_start: bool
    eval_at_end: bool
    evaluate_only: bool
    log_num_zeros: bool
    trial_step: bool | None
    export: bool
    final_sample_tokens: int
    max_time: float | str | None
    hang_timeout_s: float
    max_restarts: int
    target_loss: float | None
    loss_spike_factor: float | None
    max_consecutive_skips: int
    deterministic: bool
    compile: bool
    kernels: Kernels

    def __post_init__(self) -> None:
        check_at_least_one(
            "run",
            self,
            "global_batch_size",
            "max_consecutive_skips",
            "max_steps",
            *(["micro_batch_size"] if self.micro_batch_size != "auto" else []),
        )
        intervals = ("eval_every_epochs", "final_sample_tokens")
        check_at_least_zero("run", self, *intervals, "seed", "hang_timeout_s", "max_restarts")
        check_at_least_one("run.loss_scale", self.loss_scale, "initial", "growth_interval")
        if not self.output_dir:
            raise ConfigError("run.output_dir: is empty; name a folder, such as outputs.")
        if not self.loss_scale.initial <= LARGEST_SCALE:
            raise ConfigError(f"run.loss_scale.initial: must be at most {LARGEST_SCALE:g}; use 65536.")
        if self.max_time is not None:
            seconds(self.max_time)
        if self.loss_spike_factor is not None and not 1 < self.loss_spike_factor < math.inf:
            raise ConfigError(
                f"run.loss_spike_factor: must be above 1, got {self.loss_spike_factor}; use 3, or null for "
                "no guard."
            )
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(
                f"run.epochs: must be above 0, got {self.epochs}; give a number such as 0.5 or 3."
            )
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise ConfigError(f"run.target_loss: must be a finite number, got {self.target_loss}; use 0.1.")
        check_cadence("run.eval_every", self.eval_every)
        check_cadence("run.log_every", self.log_every)
        if self.seed >= 2**63:
            raise ConfigError(f"run.seed: must be below 2**63, got {self.seed}.")
        if self.max_steps is None and self.epochs is None:
            raise ConfigError("run.max_steps: is null and so is run.epochs; give one of them.")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(
                f"run.name: {self.name!r} is not a folder name; leave out '/' and a leading '.'."
            )

    def evaluates_within(self, num_steps: int) -> bool:
        """Return whether a periodic evaluation may be due in a run of ``num_steps`` steps.

        Those at the start and at the end of the run are not periodic.
        """
        in_epochs = 0 < self.eval_every_epochs <= (self.epochs or math.inf)
        return in_epochs or 0 < self.eval_every <= num_steps

    @property
    def evaluates_after_steps(self) -> bool:
        """Whether the run evaluates after some or all steps, or at its end, if it has data for that."""
        return bool(self.eval_every or self.eval_every_epochs or self.eval_at_end)

    @property
    def rows_per_microbatch(self) -> int:
        """``micro_batch_size``, or the smallest size, 1, while it is ``auto``."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size


@dataclass(frozen=True)
class CheckpointConfig:
    """``checkpoint.*``: saving, retention, resuming and initial weights."""

    save_every: float
    """Number of steps, or, if below 1, a share of the run."""
    save_every_epochs: int
    model_only: bool
    keep_last: int
    keep_best: str | None
    keep_best_mode: Literal["min", "max"] | None
    async_save: bool
    on_error: Literal["stop", "continue"]
    resume: str
    verify: bool
    allow_mismatch: bool
    init_from: str | None

    def __post_init__(self) -> None:
        check_at_least_zero("checkpoint", self, "save_every_epochs", "keep_last")
        check_cadence("checkpoint.save_every", self.save_every)


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """``early_stopping.*``: the metric whose lack of improvement ends a run."""

    metric: str | None
    patience: int
    mode: Literal["min", "max"] | None

    def __post_init__(self) -> None:
        check_at_least_one("early_stopping", self, "patience")


@dataclass(frozen=True)
class ProfilerConfig:
    """``profiler.*``: the steps and ranks that torch's profiler records, and the level of detail."""

    enabled: bool
    steps: tuple[int, int]
    ranks: tuple[int, ...]
    memory: bool
    shapes: bool
    stacks: bool

    def __post_init__(self) -> None:
        first, last = self.steps
        if not 1 <= first <= last:
            raise ConfigError(
                f"profiler.steps: must be the first and the last step to record, from 1 on, got [{first}, "
                f"{last}]; use [3, 4]."
            )


@dataclass(frozen=True)
class PreflightConfig:
    """``preflight.*``: the checks and forecasts before or instead of the run, and their devices."""

    mode: Literal["check", "only", "plan", "rehearse", "prove"]
    devices: int | None
    device_memory: float | str | None
    device_name: str | None
    rank: int | None
    steps: int | None
    shrink: Limits

    def __post_init__(self) -> None:
        check_at_least_one("preflight", self, "devices", "steps")
        check_at_least_one("preflight.shrink", self.shrink, "layers", "hidden", "vocabulary", "max_length")
        if self.devices is not None and self.devices > MOST_DEVICES:
            raise ConfigError(f"preflight.devices: must be at most {MOST_DEVICES}, got {self.devices}.")

    @property
    def num_steps(self) -> int:
        """Number of steps: ``steps``, or by default 3 for a proof and 2 for a rehearsal.

        In a proof, the loss of the third step also depends on the optimizer state after the first update.
        """
        return self.steps or (3 if self.mode == "prove" else 2)


@dataclass(frozen=True)
class WatchedMetric:
    """The evaluation metric that ``checkpoint.keep_best`` and ``early_stopping.metric`` watch."""

    name: str
    mode: Literal["min", "max"]


def check_cadence(key: str, value: float) -> None:
    """Raise ConfigError if a cadence is neither a number of steps nor a share of the run."""
    if not 0 <= value < math.inf or (value > 1 and value != int(value)):
        raise ConfigError(
            f"{key}: must be 0 (off), a share of the run below 1, or a number of steps, got {value}; use 0.1 "
            "or 100."
        )


def every(cadence: float, step: int, last: int) -> bool:
    """Return whether ``step`` is a multiple of ``cadence``.

    A cadence below 1 is a share of ``last``, the number of steps; 0 means never.
    """
    if not cadence:
        return False
    steps = int(cadence) if cadence >= 1 else whole_steps(cadence * last)
    return step % steps == 0


def watched_metric(
    run: RunConfig,
    checkpoint: CheckpointConfig,
    early_stopping: EarlyStoppingConfig,
    *,
    hooks_evaluate: bool = False,
) -> WatchedMetric | None:
    """Return the metric that checkpoints and early stopping watch, or None if they watch none.

    ``hooks_evaluate`` means that a hook may request evaluations.

    Raises:
        ConfigError: if they watch different metrics or modes, a metric is not an evaluation metric, no mode
            is given for a metric that is not a loss, or there are no evaluations before the end.
    """
    watched = {
        "checkpoint.keep_best": (
            checkpoint.keep_best,
            "checkpoint.keep_best_mode",
            checkpoint.keep_best_mode,
        ),
        "early_stopping.metric": (early_stopping.metric, "early_stopping.mode", early_stopping.mode),
    }
    given = {
        key: WatchedMetric(name, mode or min_of_loss(name, mode_key))
        for key, (name, mode_key, mode) in watched.items()
        if name is not None
    }
    for key, metric in given.items():
        if not metric.name.startswith("eval/"):
            raise ConfigError(f"{key}: {metric.name!r} is not a metric of the evaluation; use eval/loss.")
        if not (run.eval_every or run.eval_every_epochs or hooks_evaluate):
            raise ConfigError(
                f"{key}: {metric.name} is read after every evaluation, and there is none before the end "
                "(run.eval_every=0); set run.eval_every or run.eval_every_epochs."
            )
    if len(set(given.values())) > 1:
        kept, monitored = given.values()
        raise ConfigError(
            f"early_stopping.metric: watches {monitored.mode} {monitored.name}, and checkpoint.keep_best "
            f"{kept.mode} {kept.name}; name one metric and one mode."
        )
    return next(iter(given.values()), None)


def min_of_loss(metric: str, key: str) -> Literal["min"]:
    """Return the mode of a loss; raise ConfigError for another metric, whose mode ``key`` must give."""
    if metric.endswith("loss"):
        return "min"
    raise ConfigError(f"{key}: which value of {metric} is the best? Use max (the largest) or min.")


def check_restart_source(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    if run.max_restarts and checkpoint.model_only:
        raise ConfigError(
            "run.max_restarts: a run cannot restart from weights only; set checkpoint.model_only=false or "
            "run.max_restarts=0."
        )


def seconds(value: float | str) -> float:
    """Return the seconds of ``run.max_time``, which is a number of seconds or text.

    Text has the form ``HH:MM:SS``, SLURM's form ``D-HH:MM:SS``, or a form such as ``3h30m``.

    Raises:
        ConfigError: if the value has none of these forms, or is not above 0.
    """
    text = str(value)
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if found := clock or units:
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        total = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        total = float(text) if re.fullmatch(r"\d+(\.\d*)?", text) else 0.0
    if total <= 0:
        raise ConfigError(f"run.max_time: {text!r} is not a duration; give seconds, HH:MM:SS, or 3h30m.")
    return total
