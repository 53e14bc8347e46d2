"""Rehearsals by the command line, in processes forked from one that has imported everything."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from components.contracts.json_types import Json
from components.rehearsal.memory_components import INSIDE
from runner.training.rehearsal import rehearse_rank
from tests.e2e.commands import call_here
from tests.forkserver import Process
from tests.patience import patience

LIMIT_S = 120
GIB = 2**30


@dataclass(frozen=True)
class Rehearsed:
    """Everything that one rehearsal recorded."""

    sections: dict[str, Any]
    """preflight.json."""
    record: Json
    """rehearsal.json."""

    @property
    def peak(self) -> int:
        peak: int = self.record["memory"]["peak"]
        return peak

    @property
    def estimate(self) -> int:
        estimate: int = self.sections["rehearsal"]["estimated_bytes"]
        return estimate

    def waits_inside(self) -> list[str]:
        """Return the waits and blocking copies of the host inside of micro-batches, as kind and line."""
        rows = [*self.record["waits"], *self.record["blocking_copies"]]
        return [f"{row['kind']} at {row['site']}" for row in rows if row["moment"] in INSIDE]


def rehearsed(folder: Path, *overrides: str) -> Rehearsed:
    """Rehearse the run of ``overrides``; fail if the command does."""
    with mock.patch("runner.launch.rehearse.run_rehearsal", run_forked_rehearsal):
        code = call_here("preflight.mode=rehearse", f"run.output_dir={folder}", *overrides)
    assert code == 0, f"exit code {code}; the error is above"
    (made,) = (folder / "preflight").iterdir()
    return Rehearsed(
        json.loads((made / "preflight.json").read_text()), json.loads((made / "rehearsal.json").read_text())
    )


def run_forked_rehearsal(folder: Path, _: Path, request: Json) -> Json:
    """Do what ``run_rehearsal`` does in a forked process."""
    process = Process(write_record, folder, request, kind="rehearsal")
    code = process.wait(patience(LIMIT_S))
    assert code == 0, f"the rehearsal ended with {code}; its error is above"
    record: Json = json.loads((folder / "rehearsal.json").read_text())
    return record


def write_record(folder: Path, request: Json) -> None:
    (folder / "rehearsal.json").write_text(json.dumps(rehearse_rank(folder, request)))
