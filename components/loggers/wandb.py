"""The logger for Weights & Biases."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.loggers.base import Row, RunInfo, RunResult, require

DOCUMENTS = ("config.yaml", "run.json", "audit.json", "preflight.json", "code.diff")
"""Files of the run folder that, if present, are logged as one artifact."""
EXIT_CODES = {"completed": 0, "interrupted": 1, "failed": 1}


class WandbLogger:
    """One run of Weights & Biases. A run that resumes continues its run of Weights & Biases."""

    def __init__(self, start: RunInfo, settings: Config) -> None:
        import wandb  # slow to import

        online = settings["mode"] == "online"
        # The file code.diff of the artifact has the uncommitted changes.
        code = {key: start.facts.get(key) for key in ("git_commit", "versions", "command")}
        self._run = wandb.init(
            dir=start.folder,
            config=dict(start.config) | {"code": code},
            id=run_id(start.folder),
            resume="allow" if online else None,  # wandb sync merges the files of an offline run by id
            **settings,
        )
        # The server accepts each step once; it already has the steps that a resumed run computes again.
        self._first_step = self._run.starting_step
        self._resumed_at = start.step
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for name in DOCUMENTS:
            if (start.folder / name).is_file():
                artifact.add_file(str(start.folder / name), name)
        self._run.log_artifact(artifact)

    def log(self, row: Row) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        if (step := self._accepted(int(row["step"] or 0))) is not None:
            self._run.log(values, step=step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, str]], step: int) -> None:
        import wandb

        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
        if (place := self._accepted(step)) is not None:
            self._run.log({name: table}, step=place)

    def _accepted(self, step: int) -> int | None:
        """Return the step with which the server accepts values of ``step``, or None if it has them.

        The values of the step at which a run resumed are those of an evaluation that it owed, except step 0.
        """
        if 0 < step == self._resumed_at:
            return max(step, self._first_step)
        return step if step >= self._first_step else None

    def finish(self, ending: RunResult) -> None:
        """Mark a stopped run as preempting, because it may be resumed, and a failed one as failed."""
        self._run.summary.update(
            {key: value for key, value in ending.summary.items() if key != "step"}
            | {"status": ending.status, "reason": ending.reason}
        )
        if ending.status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES[ending.status])


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases. ``mode=offline`` writes files for ``wandb sync`` to ``<run folder>/wandb``."""

    project: str | None = None
    """None means WANDB_PROJECT of the environment, or else ``runner``."""
    entity: str | None = None
    name: str | None = None
    """Name of the run. None means ``<name>/<stamp>`` of the run folder."""
    group: str | None = None
    """Group of the run. None means the name of the sweep's folder, if the run belongs to a sweep."""
    mode: Literal["online", "offline"] | None = None
    """None means WANDB_MODE of the environment, or else ``online``."""
    tags: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError if wandb is not installed, or if ``mode`` is online and there is no API key."""
        require("wandb")
        import wandb

        if self.chosen_mode == "online" and not wandb.api.api_key:
            raise ConfigError(
                "logger.wandb.mode: is online, but there is no Weights & Biases key; "
                "set WANDB_API_KEY, run `wandb login`, or set logger.wandb.mode=offline."
            )

    @property
    def chosen_mode(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    def open(self, start: RunInfo) -> WandbLogger:
        sweep = start.facts.get("sweep")
        settings = {
            "project": self.project or os.environ.get("WANDB_PROJECT") or "runner",
            "entity": self.entity,
            "name": self.name or f"{start.folder.parent.name}/{start.folder.name}",
            "group": self.group or (Path(sweep["folder"]).name if sweep else None),
            "mode": self.chosen_mode,
            "tags": [*self.tags, *(["sweep", f"job {sweep['number']}"] if sweep else [])],
        }
        return WandbLogger(start, settings)


def run_id(folder: Path) -> str:
    """Return the wandb run id stored in the run folder, or create and store one."""
    path = folder / "wandb" / "run_id"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(token_hex(4))
    return path.read_text()
