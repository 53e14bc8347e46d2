"""The process of a rehearsal: ``python -m runner.launch.rehearsal_main FOLDER LIBRARY``."""

import json
import sys
from pathlib import Path

from components.rehearsal.device_guard import load_guard
from runner.garbage_collection import collect_rarely


def main() -> None:
    """Rehearse the rank that ``FOLDER/request.json`` describes, and write ``FOLDER/rehearsal.json``."""
    collect_rarely()
    folder, library = Path(sys.argv[1]), Path(sys.argv[2])
    guard = load_guard(library)
    import torch  # noqa: F401  after the library and before everything else

    guard.register_guard()
    from runner.training.rehearsal import rehearse_rank

    request = json.loads((folder / "request.json").read_text())
    (folder / "rehearsal.json").write_text(json.dumps(rehearse_rank(folder, request), indent=1) + "\n")


if __name__ == "__main__":
    main()
