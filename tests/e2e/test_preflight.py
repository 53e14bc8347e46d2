"""``preflight.mode``: forecasts against real runs, and the modes that start no run."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import MISTAKE
from tests.e2e.commands import SMALL, call_here, newest, rows, run_here

LARGE = ["model=llama3_70b", "parallelism=megatron", *(f"parallelism.{n}" for n in ("tp=8", "pp=4", "dp=16"))]
H100 = ["run.dtype=bf16", "preflight.device_name=H100"]


def forecast(folder: Path) -> dict[str, Any]:
    """Return the newest preflight.json below the outputs ``folder``."""
    path = max((folder / "preflight").glob("*/preflight.json"), key=lambda path: path.stat().st_mtime_ns)
    sections: dict[str, Any] = json.loads(path.read_text())
    return sections


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_forecast_is_what_happens(adapter: str, tmp_path: Path) -> None:
    run = run_here(tmp_path, *SMALL, f"adapter={adapter}")
    told, facts = json.loads((run / "preflight.json").read_text()), json.loads((run / "run.json").read_text())
    assert told["parameters"]["total"] == facts["parameters"]
    assert told["parameters"]["trainable"] == facts["trained_parameters"]
    assert told["layout"]["ranks"] == facts["world_size"]
    logged = rows(run, "train/loss")
    assert told["batch"]["steps"] == len(logged) == 4
    for name in ("tokens", "labels"):
        mean = sum(row[f"train/num_{name}"] for row in logged) / 4
        assert told["batch"][name] == pytest.approx(mean)
    seconds = [row["train/num_tokens"] / row["perf/tokens_per_s"] for row in logged]
    peak = told["device"]["peak_flops"]
    done = sum(row["perf/mfu"] * peak * s for row, s in zip(logged, seconds, strict=True)) / 4
    assert told["step"]["flops"] == pytest.approx(done, rel=1e-3)


def test_sections_are_scalars_or_tables(tmp_path: Path) -> None:
    chosen = [*SMALL, "parallelism=tp2pp2", "preflight.mode=only", f"run.output_dir={tmp_path}"]
    assert call_here(*chosen) == 0
    told = forecast(tmp_path)
    assert {"layout", "groups", "batch", "parameters", "device", "memory", "step", "keys"} == told.keys()
    for section in told.values():
        objects = section if isinstance(section, list) else [section]
        assert all(each.keys() == objects[0].keys() for each in objects)
        values = [value for each in objects for value in each.values()]
        assert all(value is None or isinstance(value, bool | int | float | str) for value in values)


def test_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.launch.run.run_rank", None)
    assert call_here(*SMALL, "preflight.mode=only", f"run.output_dir={tmp_path}") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["preflight"]
    assert forecast(tmp_path)["batch"]["steps"] == 4


def test_every_key_has_a_reader(tmp_path: Path) -> None:
    from hydra.utils import get_object

    assert call_here(*SMALL, "preflight.mode=only", f"run.output_dir={tmp_path}") == 0
    readers = {row["key"]: row["reader"] for row in forecast(tmp_path)["keys"]}
    assert readers["run.max_steps"] == "runner.config.run_config.RunConfig"
    assert readers["optimizer.lr"] == "components.optimizers.AdamW"
    assert readers["model.architecture.vocab_size"] == "components.models.ModelSpec"
    for reader in set(readers.values()):
        assert callable(get_object(reader))


def test_512_ranks_on_a_laptop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forecast needs no weights, no tokenizer of the model and no GPU."""
    assert call_here(*LARGE, "preflight.mode=only", f"run.output_dir={tmp_path}") == 0
    told = forecast(tmp_path)
    assert told["layout"] == {"ranks": 512, "parallelism": "Megatron", "pp": 4, "dp": 16, "cp": 1, "tp": 8}
    assert told["batch"]["rows"] == 32  # the default for forecasts
    assert told["parameters"]["total"] == 70_553_706_496  # from its model card
    assert [row["stage"] for row in told["memory"]] == [0, 1, 2, 3]
    assert len(told["groups"]) == 64 + 32 + 128
    shown, said = capsys.readouterr()
    assert "run.global_batch_size is not given, and 32 is assumed" in said
    for words in ("tp 8: 0-7", "512", "70,553,706,496", "preflight folder"):
        assert words in shown


@pytest.mark.parametrize("layout", ["fsdp2", "single"])
def test_what_would_not_fit_is_refused_and_what_is_offered_fits(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*SMALL, "run.micro_batch_size=4", f"parallelism={layout}", "run.global_batch_size=8"]
    keys += ["preflight.mode=only", f"run.output_dir={tmp_path}"]
    assert call_here(*keys) == 0
    (rank,) = forecast(tmp_path)["memory"]
    tight = [*keys, f"preflight.device_memory={int(0.8 * rank['total'] / 2**20)}MiB"]
    assert call_here(*tight) == MISTAKE
    message = " ".join(capsys.readouterr().err.split())
    assert "preflight.device_memory: a rank needs" in message
    offered = re.findall(r"((?:[\w.]+=\S+ ?)+)\(", message.split("cheapest first:")[1])
    assert 1 <= len(offered) <= 3
    for overrides in offered:
        assert call_here(*tight, *shlex.split(overrides)) == 0, overrides


def test_a_plan_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["model=llama3_70b", *H100, "run.global_batch_size=64", f"run.output_dir={tmp_path}"]
    assert call_here(*large, "preflight.mode=plan", "preflight.devices=64") == 0
    best = forecast(tmp_path)["plan"]
    assert len(best) >= 3
    assert [row["seconds"] for row in best] == sorted(row["seconds"] for row in best)
    capsys.readouterr()
    first = best[0]
    assert call_here(*large, *shlex.split(first["overrides"]), "preflight.mode=only") == 0
    told = forecast(tmp_path)
    assert told["layout"]["ranks"] == 64
    assert max(row["total"] for row in told["memory"]) == first["memory"]
    assert told["step"]["seconds"] == pytest.approx(first["seconds"])


def test_a_plan_keeps_micro_batches_on_which_the_loss_depends(tmp_path: Path) -> None:
    batch = ("run.global_batch_size=8", "run.micro_batch_size=2", "run.device=cpu")
    words = ("model=moe_tiny", *batch, "preflight.mode=plan", "preflight.devices=2")
    assert call_here(*words, "data.max_length=128", f"run.output_dir={tmp_path}") == 0
    plans = [row["overrides"].split() for row in forecast(tmp_path)["plan"]]
    assert {word for plan in plans for word in plan if "micro_batch_size" in word} == {
        "run.micro_batch_size=2"
    }


def test_a_plan_on_what_is_here(tmp_path: Path) -> None:
    here = (*SMALL, f"run.output_dir={tmp_path}")
    assert call_here(*here, "preflight.mode=plan", "preflight.devices=4") == 0
    for row in forecast(tmp_path)["plan"]:
        assert call_here(*here, *shlex.split(row["overrides"]), "preflight.mode=only") == 0
        assert forecast(tmp_path)["layout"]["ranks"] == 4


def test_a_sweep_of_forecasts(tmp_path: Path) -> None:
    sweep = [
        "-m",
        *SMALL,
        "preflight.mode=only",
        "parallelism=single,fsdp2,tp2",
        f"run.output_dir={tmp_path}",
    ]
    assert call_here(*sweep) == 0
    assert len(list((tmp_path / "preflight").iterdir())) == 3


@pytest.mark.parametrize("mode", ["check", "only", "plan"])
def test_a_layout_of_ones_own_has_no_forecast(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["~parallelism", "+parallelism._target_=tests.e2e.own_layout.OneRank", f"preflight.mode={mode}"]
    code = call_here(*SMALL, *own, f"run.output_dir={tmp_path}")
    shown = capsys.readouterr()
    if mode == "check":
        assert code == 0
        assert "forecast  none of memory and time" in shown.out + shown.err
        assert json.loads((newest(tmp_path) / "preflight.json").read_text()).keys() == {"keys"}
    else:
        assert code == MISTAKE
        assert f"preflight.mode: is {mode}, but only layouts of FSDP2 and Megatron" in shown.err
