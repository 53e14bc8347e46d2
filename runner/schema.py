"""The run keys: what the loop itself reads. Everything else belongs to a component."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from runner.errors import ConfigError
from runner.protocols import Kernels


@dataclass(frozen=True)
class RunConfig:
    """``run.*`` of the composed config; the comments of conf/config.yaml describe every key."""

    name: str
    output_dir: str
    max_steps: int | None
    epochs: int | None
    global_batch_size: int
    micro_batch_size: int
    seed: int
    dtype: Literal["fp32", "bf16"]
    device: Literal["auto", "cpu", "cuda"]
    log_every: int
    eval_every: int
    save_every: int
    save_epochs: int
    save_model_only: bool
    keep_last: int
    keep_best: str | None
    metric_mode: Literal["min", "max"]
    early_stop: str | None
    patience: int
    async_save: bool
    on_save_error: Literal["stop", "continue"]
    resume: str
    verify: bool
    resume_force: bool
    init_from: str | None
    export: bool
    sample_tokens: int
    max_time: float | str | None
    timeout: float
    max_restarts: int
    deterministic: bool
    spike_factor: float | None
    max_skips: int
    count_zeros: bool
    profile: bool
    profile_steps: tuple[int, int]
    profile_ranks: tuple[int, ...]
    profile_memory: bool
    profile_shapes: bool
    profile_stacks: bool
    compile: bool
    kernels: Kernels
    preflight: Literal["check", "only", "plan"]
    devices: int | None
    device_memory: float | str | None
    device_name: str | None

    def __post_init__(self) -> None:
        for key in (
            "global_batch_size",
            "micro_batch_size",
            "max_skips",
            "max_steps",
            "epochs",
            "patience",
            "devices",
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"run.{key}: must be at least 1, got {value}.")
        for key in (
            "log_every",
            "eval_every",
            "save_every",
            "save_epochs",
            "keep_last",
            "sample_tokens",
            "seed",
            "timeout",
            "max_restarts",
        ):
            if getattr(self, key) < 0:
                raise ConfigError(f"run.{key}: must be 0 (off) or more, got {getattr(self, key)}.")
        if not math.isfinite(self.timeout):
            raise ConfigError(f"run.timeout: is {self.timeout}; give a number of seconds, or 0 for off.")
        if self.max_time is not None:
            seconds(self.max_time)
        if self.max_restarts and self.save_model_only:
            raise ConfigError(
                "run.max_restarts: nothing starts again from weights alone; set run.save_model_only=false "
                "or run.max_restarts=0."
            )
        if self.spike_factor is not None and not 1 < self.spike_factor < math.inf:
            raise ConfigError(
                f"run.spike_factor: must be above 1, got {self.spike_factor}; use 3, or null for no guard."
            )
        first, last = self.profile_steps
        if not 1 <= first <= last:
            raise ConfigError(
                f"run.profile_steps: must be the first and the last step to record, from 1 on, got [{first}, "
                f"{last}]; use [3, 4]."
            )
        if self.seed >= 2**63:
            raise ConfigError(f"run.seed: must be below 2**63, got {self.seed}.")
        if self.max_steps is None and self.epochs is None:
            raise ConfigError("run.max_steps: is null and so is run.epochs; give one of them.")
        check_watched(self)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(
                f"run.name: {self.name!r} is not a folder name; leave out '/' and a leading '.'."
            )


def check_watched(run: RunConfig) -> None:
    """What ``keep_best`` and ``early_stop`` watch is one metric, and evaluations come."""
    watched = {key: getattr(run, key) for key in ("keep_best", "early_stop")}
    given = {key: metric for key, metric in watched.items() if metric is not None}
    for key, metric in given.items():
        if not metric.startswith("eval/"):
            raise ConfigError(f"run.{key}: {metric!r} is no metric of the evaluation; use eval/loss.")
        if not run.eval_every:
            raise ConfigError(
                f"run.{key}: {metric} is looked at after every evaluation, and there is but one, at the end "
                "(run.eval_every=0); set run.eval_every."
            )
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"run.early_stop: watches {run.early_stop}, and run.keep_best {run.keep_best}; name one metric."
        )


def seconds(value: float | str) -> float:
    """Of ``run.max_time``: seconds, ``HH:MM:SS``, or ``3h30m``.

    Raises:
        ConfigError: it is none of these, or not above 0.
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
        raise ConfigError(f"run.max_time: {text!r} is no time; give seconds, HH:MM:SS, or 3h30m.")
    return total
