"""``preflight.mode=prove`` of a loss and an optimizer from outside of the package."""

import json
import re
import sys
from pathlib import Path

import pytest

from components.contracts.errors import DONE, FAILED, MISTAKE, ConfigError
from runner.config.sources import ConfigSources
from runner.launch.checks import RunPreparation, check_launch
from runner.launch.prove import shrink
from tests.e2e.commands import ROOT, SMALL, call_here, composed, run_forked

FOCAL = ("stage._target_=my_losses.Focal", "+stage.gamma=2")
LION = ("optimizer=torch", "optimizer._target_=my_optimizers.Lion", "optimizer.lr=1e-3")
HOOKS = ("hook=[ema,gradient_stats]", "+hook.mine._target_=my_hooks.StopAtLoss", "+hook.mine.loss=0.1")
LARGE = (
    "model=llama3_70b",
    "parallelism=megatron",
    "parallelism.tp=8",
    "parallelism.pp=4",
    "parallelism.dp=16",
    "run.dtype=bf16",
)
MEAN = """

@dataclass(frozen=True)
class Mean(NextToken):
    def weights(self, batch: Batch) -> None: ...

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        return LossOutput({"loss": -stats.logps.sum() / max(len(batch.labelled()), 1)})
"""
HEADS = ("model.architecture.num_attention_heads=6", "model.architecture.num_key_value_heads=3")
ON_TWO = ("parallelism=fsdp2", "parallelism.dp=2")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of docs/losses.md and docs/optimizers.md, and a loss that divides by micro-batch."""
    for page in ("losses", "optimizers", "hooks"):
        monkeypatch.delitem(sys.modules, f"my_{page}", raising=False)  # of another test
        text = (ROOT / "docs" / f"{page}.md").read_text()
        source, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        (tmp_path / f"my_{page}.py").write_text(source + MEAN * (page == "losses"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ((*SMALL, *FOCAL, *LION, *ON_TWO, *HOOKS), "dp2 2 ranks"),
        ((*SMALL, *FOCAL, *LION, "parallelism=fsdp2_tp2cp2", "parallelism.dp=1"), "tp2 cp2 4 ranks"),
        ((*SMALL, *FOCAL, *LION, "parallelism=tp2pp2"), "tp2 pp2 4 ranks"),
        ((*FOCAL, *LARGE), "tp2 pp2 dp2 8 ranks"),
        (("model=moe_tiny", "stage=dpo", "parallelism=ep2"), "ep2 dp2 2 ranks"),
        ((*SMALL, "~parallelism", "+parallelism._target_=tests.e2e.own_layout.OneRank"), "1 rank"),
        (("adapter=lora", "adapter.dropout=0.1", *SMALL, "parallelism=fsdp2_tp2"), "tp2 dp2 4 ranks"),
        (("optimizer=muon", "adapter=lora", *SMALL, "parallelism=fsdp2_cp2"), "cp2 dp2 4 ranks"),
    ],
    ids=["two", "fsdp2_tp2cp2", "tp2pp2", "large", "experts", "layout", "adapter", "muon"],
)
def test_a_proof(
    own: Path, overrides: tuple[str, ...], ranks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss and an optimizer of one's own have the gradients and the curve of one process."""
    assert call_here(*overrides, "preflight.mode=prove", f"run.output_dir={own}") == DONE
    (folder,) = (own / "preflight").iterdir()
    told = json.loads((folder / "preflight.json").read_text())
    one, layout, control = told["proof"]
    assert layout["run"] == ranks
    for errors in (one, layout):
        assert 0 < max(errors[key] for key in ("gradient", "loss", "grad_norm")) <= 1e-5
    assert control["gradient"] > 1e-2
    assert len(json.loads((folder / "layout" / "curve.json").read_text())) == 3
    if "model=llama3_70b" in overrides:
        changed = {row["key"]: (row["composed"], row["proof"]) for row in told["changed"]}
        assert changed["parallelism.tp"] == ("8", "2")
        assert changed["model.architecture.num_hidden_layers"] == ("80", "4")
    shown = "".join(capfd.readouterr())
    assert "The gradients and curves of this layout are those of one process" in " ".join(shown.split())
    assert max(len(line) for line in shown.splitlines() if line[:1] in "│┃") <= 80


def test_a_loss_that_divides_by_its_micro_batch(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loss = "stage._target_=my_losses.Mean"
    assert call_here(*SMALL, loss, *ON_TWO, "preflight.mode=prove", f"run.output_dir={own}") == FAILED
    said = " ".join("".join(capfd.readouterr()).split())
    assert "1 and 2 rows in a micro-batch differ in one process already, the gradient of model." in said


def shrunk(*overrides: str) -> tuple[RunPreparation, dict[str, tuple[str, str]]]:
    launch = check_launch(composed([*overrides, "run.name=x", "preflight.mode=prove"]), ConfigSources(), ())
    small, changed = shrink(launch)
    return small, {row["key"]: (row["composed"], row["proof"]) for row in changed}


@pytest.mark.parametrize(
    ("rank", "more", "least"),
    [(128, (), 64), (64, (), None), (64, ("adapter.init_lora_weights=pissa",), 32)],
    ids=["over", "fits", "pissa"],
)
def test_the_rank_fits_the_small_model(rank: int, more: tuple[str, ...], least: int | None) -> None:
    _, changed = shrunk("model=llama3_1b", "adapter=lora", f"adapter.r={rank}", *more)
    assert changed.get("adapter.r") == (None if least is None else (str(rank), str(least)))


def test_the_reference_of_a_quantised_model_is_in_4_bits() -> None:
    small, changed = shrunk(*SMALL, "stage=dpo", "adapter=qlora", "stage.reference_path=x")
    assert changed["stage.reference"] == ("auto", "adapter_off")
    assert small.reference.choice == "adapter_off"


def test_hooks_that_act_after_evaluations_are_left_out() -> None:
    small, changed = shrunk(*SMALL, "hook=[ema,samples]", "hook.samples.prompts=README.md")
    assert [*small.experiment.hook] == [*small.config["hook"]] == ["ema"]
    assert changed["hook.samples"] == ("given", "left out")


def test_an_adapter_of_layers_that_the_small_model_lacks() -> None:
    with pytest.raises(ConfigError, match=r"matches no module of llama.*use preflight\.shrink\.layers=null"):
        shrunk("model=llama3_1b", "adapter=lora", "adapter.target_modules=[layers.9.self_attn.q_proj]")


def test_a_failing_rank_is_told_with_its_traceback(tmp_path: Path) -> None:
    chosen = ["stage._target_=tests.e2e.losses.Fails", "+stage.how=raise", "preflight.mode=prove"]
    answer = run_forked(*SMALL, *chosen, *ON_TWO, f"run.output_dir={tmp_path}", cwd=ROOT)
    assert answer.returncode == FAILED
    for words in ("rank 1 failed", "RuntimeError: the third call is a bad one", "losses.py"):
        assert words in answer.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preflight.device_name=H100"], "preflight.device_name"),
        (["preflight.device_memory=1GiB"], "preflight.device_memory"),
        # The small model would have two key-value heads.
        (["parallelism=tp2", *HEADS], "parallelism.tp"),
        (["preflight.shrink.layers=0"], "preflight.shrink.layers"),
        (["run.max_steps=2"], "preflight.steps: is 3, but the run has 2"),
        (["adapter=lora", "adapter.r=65"], "adapter.r: 65 is larger than the smaller side"),
    ],
)
def test_refused(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = call_here(*SMALL, "preflight.mode=prove", *overrides, f"run.output_dir={tmp_path}")
    assert code == MISTAKE
    assert capsys.readouterr().err.startswith(f"error: {words}")
    assert not (tmp_path / "preflight").exists()
