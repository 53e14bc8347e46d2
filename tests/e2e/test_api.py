"""The program as a library: ``runner.api.train``, and the example that drives an engine by hand."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import ConfigError, TrainingError
from components.engines.fsdp2 import FSDP2
from runner import api
from tests.distributed.reinforce_cases import EXAMPLE, reinforced
from tests.e2e.commands import EXPORTING, FORKING, ROOT, SMALL, curve, little_data, run_here
from tests.ranks import Ranks
from tests.unit.runner.launch.test_slurm_env import TASK


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("runner.launch.spawn.subprocess", FORKING)
    with little_data():
        yield


def test_a_run_is_that_of_the_command(tmp_path: Path) -> None:
    words = (*EXPORTING, "stage=pt", "run.eval_every=2", "checkpoint.save_every=2")
    expected, argv = run_here(tmp_path / "command", *words), list(sys.argv)
    result = api.train([*words, f"run.output_dir={tmp_path}/api"])
    assert curve(result.folder) == curve(expected)
    assert sys.argv == argv
    assert result.status == "completed"
    assert result.metrics["step"] == 4
    assert result.metrics["eval/loss"] == curve(expected)[-1]["eval/loss"]
    assert result.export == result.folder / "export"
    assert (result.export / "model.safetensors").is_file()


def test_keys_may_be_a_mapping_and_ranks_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks find a class in a folder that only this process has on its search path."""
    (tmp_path / "src/components").mkdir(parents=True)
    (tmp_path / "src/components/__init__.py").write_text("raise ValueError('not this package')")
    own = "from components.losses import NextToken\nclass OwnLoss(NextToken): pass\n"
    (tmp_path / "src/loss_of_a_notebook.py").write_text(own)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "src")])
    keys = dict(word.split("=") for word in EXPORTING)
    run: dict[str, Any] = {"output_dir": str(tmp_path), "name": "it's 2", "max_steps": 2, "export": False}
    keys |= {"parallelism": "fsdp2", "stage._target_": "loss_of_a_notebook.OwnLoss"}
    result = api.train(keys | {"parallelism.dp": 2, "run": run})
    assert len(curve(result.folder)) >= 2
    assert "logs" in {path.name for path in result.folder.iterdir()}  # those of rank 1
    assert result.folder.parent == tmp_path / "it's 2"
    assert result.export is None


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        (["optimizer.lrr=1"], r"did you mean 'optimizer\.lr'"),
        ({"optimizer.lr": "fast"}, r"optimizer\.lr \(the command line\): got 'fast'"),
        ({"stage": "dpp"}, "did you mean 'dpo'"),
        (["-m", "run.seed=1,2"], "is not one run to train"),
        (["-m", "hydra.mode=RUN", "run.seed=1,2"], "is not one run to train"),
        (["sweep=lr_layout"], "is not one run to train"),
        (["preflight.mode=only"], "is not one run to train"),
        (["--cutoff_len=9"], "use data.max_length"),
    ],
)
def test_a_mistake_is_raised(experiment: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        api.train(experiment)


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, TASK, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}],
    ids=["torchrun", "srun", "salloc"],
)
def test_one_of_several_ranks_does_not_train(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    """A shell of salloc is not a rank, and gets the message of its command."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    is_rank = "SLURM_NTASKS" not in environ
    with pytest.raises(ConfigError, match="is one of [25] of torchrun or srun" if is_rank else "optimizer"):
        api.train(["optimizer.lrr=1"])


def test_a_sweep_that_a_file_starts_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    sweep = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {run.seed: '1,2'}}}"
    (tmp_path / "experiment" / "many.yaml").write_text(sweep)
    words = [f"--config-dir={tmp_path}", "experiment=many", f"run.output_dir={tmp_path}/out", *SMALL]
    with pytest.raises(ConfigError, match="is not one run to train"):
        api.train(words)
    assert not [*tmp_path.glob("out/*/*/run.json")]


def test_a_failure_is_raised_and_a_stop_is_a_status(tmp_path: Path) -> None:
    out = f"run.output_dir={tmp_path}"
    ranks = ("parallelism=fsdp2", "parallelism.dp=2")
    with pytest.raises(TrainingError, match="the third call is a bad one"):
        api.train([*SMALL, *ranks, out, "stage._target_=tests.e2e.losses.Fails"])
    result = api.train([*SMALL, out, "stage._target_=tests.e2e.losses.Signalled", "checkpoint.save_every=1"])
    assert result.status == "interrupted"
    assert result.export is None
    assert (result.folder / "checkpoints").is_dir()


def test_an_engine_is_driven_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """The rewarded answers become likely, as much on two ranks as on one."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, *_, last = capsys.readouterr().out.split(": ")[1].split()
    assert float(first) < 0.55 < 0.9 < float(last)
    one = reinforced(FSDP2(dp=1))
    for rates in Ranks(2).run(reinforced, FSDP2()):
        assert rates == pytest.approx(one, rel=1e-4)


def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/library.md: two runs in one process, the second with another seed."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.S)
    short = ", ".join(f'"{word}"' for word in SMALL)
    (tmp_path / "script.py").write_text(script.replace('["stage=pt"', f'[{short}, "stage=pt"'))
    monkeypatch.chdir(tmp_path)
    trained, keys = api.train, dict(word.split("=") for word in SMALL)
    # The list of the first run is made short above, the mapping of the second one here.
    short_too = lambda given: trained(keys | given if isinstance(given, dict) else given)  # noqa: E731
    monkeypatch.setattr(api, "train", short_too)
    left = runpy.run_path("script.py", run_name="__main__")
    first, second = curve(left["result"].folder), curve(left["again"].folder)
    assert len(first) == len(second)
    assert first != second
