from pathlib import Path

import pytest

from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from tests.e2e.commands import SMALL, composed, little_data

PATH = "model.path=Qwen/Qwen3-0.6B"


def said(overrides: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the checks of a run write to the terminal."""
    config = composed([*SMALL, *overrides, f"run.output_dir={folder}", "run.name=x"])
    with little_data():
        check_launch(config, ConfigSources(), ()).inspect()
    written = capsys.readouterr()
    return written.out + written.err


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [((PATH, "adapter=lora"), True), ((PATH,), False), (("adapter=lora",), False)],
    ids=["adapter", "all weights", "no path"],
)
def test_an_adapter_on_random_weights_is_named(
    overrides: tuple[str, ...], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(overrides, tmp_path, capsys)
    assert ("the frozen weights below the adapter are random" in text) == warned


@pytest.mark.parametrize("evaluates", [True, False])
def test_samples_that_no_evaluation_reads_are_named(
    evaluates: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be held out for a later one."""
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\nthree\nfour\n")
    data = ("stage=pt", "data=files", f"data.train={texts}", "data.eval_fraction=0.25")
    text = said((*data, f"run.eval_at_end={str(evaluates).lower()}"), tmp_path, capsys)
    assert ("data.eval_fraction=0.25: this share of the samples is held out" in text) != evaluates


@pytest.mark.parametrize(("every", "warned"), [(4, False), (5, True)])
def test_a_reference_that_no_step_reaches_is_named(
    every: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dpo = ("stage=dpo", "run.max_steps=4", f"stage.sync_reference_every={every}")
    assert (
        "the run has 4 steps, so the reference model is never updated" in said(dpo, tmp_path, capsys)
    ) == warned


@pytest.mark.parametrize(
    ("cadence", "warned"),
    [
        ("eval_every=4", False),
        ("eval_every=0.5", False),
        ("eval_every=5", True),
        ("eval_every_epochs=1", False),
    ],
)
def test_a_metric_that_is_not_evaluated_within_the_run_is_named(
    cadence: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watching = ("run.max_steps=4", "checkpoint.keep_best=eval/loss")
    text = said((*watching, f"run.{cadence}"), tmp_path, capsys)
    assert ("checkpoint.keep_best: no evaluation is due before the end of the run, after 4" in text) == warned
