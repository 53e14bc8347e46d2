"""Messages about a folder of runs, where that of a model, an adapter or a checkpoint is expected."""

from collections.abc import Callable
from pathlib import Path

import pytest

from components.adapters.peft_folder import read_settings
from components.checkpoint import resolve_checkpoint
from components.contracts.errors import ConfigError
from components.models.hf_config import read_hf_config
from components.run_exports import hint_for_run

READERS: dict[str, Callable[[Path], object]] = {
    "model": lambda folder: read_hf_config(folder, trust_remote_code=False),
    "adapter": lambda folder: read_settings(str(folder)),
    "checkpoint": lambda folder: resolve_checkpoint("checkpoint", str(folder)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_export_of_the_newest_run_is_named(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    assert hint_for_run(tmp_path) == ""
    for stamp in ("2026-01-01_00-00-00", "2026-01-02_00-00-00"):
        (tmp_path / "sft" / stamp / "export").mkdir(parents=True)
        (tmp_path / "sft" / stamp / "run.json").write_text("{}")
    (tmp_path / "sft" / "z" / "export").mkdir(parents=True)  # of something else
    newest = tmp_path / "sft" / "2026-01-02_00-00-00"
    for folder in (tmp_path, tmp_path / "sft", newest):
        with pytest.raises(ConfigError) as caught:
            reader(folder)
        assert str(caught.value).endswith(f" A run exported its model to {newest / 'export'}; use that.")
