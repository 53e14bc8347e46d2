from pathlib import Path

import pytest

from benchmarks.compose import composed
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from tests.e2e.commands import SMALL, little_data

PATH = "model.path=Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [((PATH, "adapter=lora"), True), ((PATH,), False), (("adapter=lora",), False)],
    ids=["adapter", "all weights", "no path"],
)
def test_an_adapter_on_random_weights_is_named(
    overrides: tuple[str, ...], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = composed([*SMALL, *overrides, f"run.output_dir={tmp_path}", "run.name=x"])
    with little_data():
        check_launch(config, ConfigSources(), ()).inspect()
    told = capsys.readouterr()
    assert ("the frozen weights below the adapter are random" in told.out + told.err) == warned
