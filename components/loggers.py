"""Where the numbers of a run go. A row is ``{"step": 10, "train/loss": 2.3, ...}``."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from runner.errors import ConfigError

Row = Mapping[str, float | int | None]
"""None: asked for, but there is no value. ``step`` is always there."""


class Logger(Protocol):
    def log(self, row: Row) -> None: ...

    def close(self) -> None:
        """Everything logged is on disk (or sent) when this returns."""


class JsonlLogger:
    """One flushed JSON object a line; a number that is not finite, which JSON has no word for, is null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        finite = {key: value if is_number(value) else None for key, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorboardLogger:
    def __init__(self, folder: Path, config: Mapping[str, Any], flush_secs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(folder), flush_secs=flush_secs)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, row: Row) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    def __init__(self, folder: Path, config: Mapping[str, Any], **settings: Any) -> None:
        import wandb  # slow to import

        try:
            self._run = wandb.init(dir=folder, config=dict(config), **settings)
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"logger=wandb: {reason}; or set logger.mode=offline.") from error

    def log(self, row: Row) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class MultiLogger:
    """Every row to every logger, in order."""

    def __init__(self, *loggers: Logger) -> None:
        self._loggers: Sequence[Logger] = loggers

    def log(self, row: Row) -> None:
        for logger in self._loggers:
            logger.log(row)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


@dataclass(frozen=True)
class Jsonl:
    """``logger=jsonl``: metrics.jsonl alone."""

    def check(self) -> None:
        """Nothing can be missing."""

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Logger:  # noqa: ARG002
        return JsonlLogger(run_dir / "metrics.jsonl")


@dataclass(frozen=True)
class Tensorboard:
    """``logger=tensorboard``: metrics.jsonl, and events in the folder ``tensorboard`` of the run."""

    flush_secs: int = 10

    def __post_init__(self) -> None:
        if self.flush_secs < 1:
            raise ConfigError(f"logger.flush_secs: must be at least 1, got {self.flush_secs}.")

    def check(self) -> None:
        require("tensorboard")

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Logger:
        events = TensorboardLogger(run_dir / "tensorboard", config, self.flush_secs)
        return MultiLogger(Jsonl().open(run_dir, config), events)


@dataclass(frozen=True)
class Wandb:
    """``logger=wandb``: metrics.jsonl, and a Weights & Biases run."""

    project: str = "runner"
    entity: str | None = None
    name: str | None = None
    """None: the run folder's own name and its parent's."""
    mode: Literal["online", "offline"] = "online"
    tags: tuple[str, ...] = ()

    def check(self) -> None:
        """ConfigError where a run would find wandb missing, or nobody logged in."""
        require("wandb")
        import wandb

        if self.mode == "online" and not wandb.api.api_key:
            raise ConfigError(
                "logger.mode: is online, but there is no Weights & Biases key; "
                "set WANDB_API_KEY, run `wandb login`, or set logger.mode=offline."
            )

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Logger:
        name = self.name or f"{run_dir.parent.name}/{run_dir.name}"
        online = WandbLogger(
            run_dir,
            config,
            project=self.project,
            entity=self.entity,
            name=name,
            mode=self.mode,
            tags=self.tags,
        )
        return MultiLogger(Jsonl().open(run_dir, config), online)


def require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"logger={package}: the package is not installed; pip install {package}.")


def is_number(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)
