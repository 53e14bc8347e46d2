"""Weights & Biases."""

from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.loggers.base import Row, RunInfo, RunResult, require

DOCUMENTS = ("config.yaml", "run.json", "audit.json", "preflight.json", "code.diff")
"""Of the run folder, kept as one artifact of the run, as far as they are there."""
EXIT_CODES = {"done": 0, "stopped": 1, "failed": 1}


class WandbLogger:
    """One run of Weights & Biases, which a run that goes on in its folder continues."""

    def __init__(self, start: RunInfo, settings: Config) -> None:
        import wandb  # slow to import

        online = settings["mode"] == "online"
        self._run = wandb.init(
            dir=start.folder,
            config=dict(start.config) | {"code": code_state(start.facts)},
            id=run_id(start.folder),
            resume="allow" if online else None,  # files of an offline run are one run when they are sent
            **settings,
        )
        # A server has no place for a step twice; those that are computed again are there already.
        self._first_step = self._run.starting_step
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for name in DOCUMENTS:
            if (start.folder / name).is_file():
                artifact.add_file(str(start.folder / name), name)
        self._run.log_artifact(artifact)

    def log(self, row: Row) -> None:
        step = row["step"] or 0
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        if step >= self._first_step:
            self._run.log(values, step=step)

    def finish(self, ending: RunResult) -> None:
        """A run that was stopped is marked as one that may go on, one that has failed as failed."""
        self._run.summary.update(
            {key: value for key, value in ending.summary.items() if key != "step"}
            | {"status": ending.status, "reason": ending.reason}
        )
        if ending.status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES[ending.status])


@dataclass(frozen=True)
class Wandb:
    """``mode``: ``online``, or ``offline``: files in the folder ``wandb`` of the run, for ``wandb sync``."""

    project: str = "runner"
    entity: str | None = None
    name: str | None = None
    """None: the run folder's own name and its parent's."""
    group: str | None = None
    """None: the name of the sweep's folder, where the run belongs to one."""
    mode: Literal["online", "offline"] = "online"
    tags: tuple[str, ...] = ()

    def check(self) -> None:
        """ConfigError where a run would find wandb missing, or nobody logged in."""
        require("wandb")
        import wandb

        if self.mode == "online" and not wandb.api.api_key:
            raise ConfigError(
                "logger.wandb.mode: is online, but there is no Weights & Biases key; "
                "set WANDB_API_KEY, run `wandb login`, or set logger.wandb.mode=offline."
            )

    def open(self, start: RunInfo) -> WandbLogger:
        sweep = start.facts.get("sweep")
        settings = {
            "project": self.project,
            "entity": self.entity,
            "name": self.name or f"{start.folder.parent.name}/{start.folder.name}",
            "group": self.group or (Path(sweep["folder"]).name if sweep else None),
            "mode": self.mode,
            "tags": [*self.tags, *(["sweep", f"job {sweep['number']}"] if sweep else [])],
        }
        return WandbLogger(start, settings)


def run_id(folder: Path) -> str:
    """That of the wandb run which began in the run folder, else a new one, which is kept there."""
    path = folder / "wandb" / "run_id"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(token_hex(4))
    return path.read_text()


def code_state(facts: Config) -> Json:
    """Which code ran: ``code.diff`` of the artifact is what its commit lacks."""
    return {key: facts.get(key) for key in ("git_commit", "versions", "command")}
