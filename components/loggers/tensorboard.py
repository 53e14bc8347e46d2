"""The logger that writes TensorBoard events."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.contracts.errors import ConfigError
from components.json_text import leaves
from components.loggers.base import Row, RunInfo, RunResult, require


class TensorboardLogger:
    """A writer of scalars, of the config as text and, at the end, of the hyperparameters with last values.

    The last values are under ``final/...``. When a run is resumed, the purge step makes TensorBoard drop what
    was logged after the checkpoint.
    """

    def __init__(self, start: RunInfo, flush_secs: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder = start.folder / "tensorboard"
        purge_step = (start.step and start.step + 1) if folder.is_dir() else None
        self._config = start.config
        self._writer = SummaryWriter(str(folder), flush_secs=flush_secs, purge_step=purge_step)
        text = json.dumps(start.config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", start.step)

    def log(self, row: Row) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, row["step"])

    def log_table(self, name: str, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """Write the rows as text, each key in bold before its value."""
        shown = ("\n\n".join(f"**{key}** {value}" for key, value in row.items()) for row in rows)
        self._writer.add_text(name, "\n\n---\n\n".join(shown), step)

    def finish(self, ending: RunResult) -> None:
        """Write the hyperparameters if the run is completed.

        TensorBoard shows any run with hyperparameters as successful.
        """
        if ending.status == "completed":
            final = {f"final/{key}": value for key, value in ending.summary.items() if key != "step"}
            step = ending.summary.get("step")
            config = {  # a value that is neither a number nor text becomes JSON
                key: value if isinstance(value, str | float | int | bool) else json.dumps(value, default=str)
                for key, value in leaves(self._config)
            }
            self._writer.add_hparams(config, final, run_name=".", global_step=step)
        self._writer.close()


@dataclass(frozen=True)
class Tensorboard:
    """Settings of ``logger=tensorboard``, which writes event files to ``tensorboard`` in the run folder."""

    flush_secs: int = 10

    def __post_init__(self) -> None:
        if self.flush_secs < 1:
            raise ConfigError(
                f"logger.tensorboard.flush_secs: must be at least 1, got {self.flush_secs}; use 10."
            )

    def check(self) -> None:
        require("tensorboard")

    def open(self, start: RunInfo) -> TensorboardLogger:
        return TensorboardLogger(start, self.flush_secs)
