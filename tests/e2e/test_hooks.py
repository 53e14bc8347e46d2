"""Hooks of the ``hook`` group in whole runs, on both engines."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from components.checkpoint.reader import StoredTensors
from components.contracts.hook import Hook, HookRun
from components.data.records.options import RecordOptions
from components.hooks import Samples
from components.models.generate import complete
from runner.commands import export
from runner.config.instantiate import build_experiment
from runner.config.sources import ConfigSources
from tests.e2e.commands import ROOT, SMALL, call_here, composed, curve, rows, run_here

RUN = (*SMALL, "run.micro_batch_size=1", "scheduler=constant", "optimizer.lr=1e-2")
EVERY = ("checkpoint.save_every=1", "checkpoint.keep_last=0")
DOCS = (ROOT / "docs" / "hooks.md").read_text()


def averages(run: Path, decay: float) -> dict[str, Tensor]:
    """Average the weights of the checkpoints of ``run`` from step 1 on with torch's function."""
    update, average = get_ema_multi_avg_fn(decay), list[Tensor]()
    for folder in sorted((run / "checkpoints").iterdir()):
        stored = StoredTensors(folder)
        names = sorted(stored.shapes("model"))
        weights = [stored.read(f"model/{name}") for name in names]
        if average:
            update(average, weights, 0)
        else:  # a hook that begins here: the average after the first step
            average = [stored.read(f"hook/ema/{name}") for name in names]
    return dict(zip(names, average, strict=True))


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_an_average_of_weights_continues_on_other_layouts(
    tmp_path: Path, adapted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on one rank, resumed with Megatron's distributed optimizer, then with tensor parallelism."""
    decay, adapter = 0.6, ("adapter=lora", "adapter.r=4") if adapted else ()
    options = (*RUN, *EVERY, *adapter, "hook=[ema]", f"hook.ema.decay={decay}")
    straight = run_here(tmp_path / "straight", *options, "run.max_steps=6")
    expected = averages(straight, decay)
    weights = "adapter_model.safetensors" if adapted else "model.safetensors"
    found = load_file(straight / "ema" / weights)
    if not adapted:
        assert found.keys() >= expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    earlier = tmp_path / "earlier"
    words = (f"checkpoint={straight}/checkpoints/step_00000006", "hook=ema", f"output={earlier}")
    with mock.patch("sys.argv", ["runner.export", *words]), pytest.raises(SystemExit, match="0"):
        export.main()
    assert equal(load_file(earlier / weights), found)
    other = (*words[:1], "hook=gradient_stats", f"output={tmp_path / 'none'}")
    with mock.patch("sys.argv", ["runner.export", *other]), pytest.raises(SystemExit, match="2"):
        export.main()
    assert "holds no average of a hook gradient_stats; give a hook of its run" in " ".join(
        capsys.readouterr().err.split()
    )
    parts = run_here(tmp_path / "parts", *options, "run.max_steps=2")
    for layout, steps in (
        (("parallelism=megatron_dp2", "parallelism.distributed_optimizer=true"), 4),
        (("parallelism=fsdp2_tp2",), 6),
    ):
        last = max((parts / "checkpoints").iterdir())
        parts = run_here(
            tmp_path / str(steps), *options, *layout, f"run.max_steps={steps}", f"checkpoint.resume={last}"
        )
    resumed = load_file(parts / "ema" / weights)
    assert resumed.keys() == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-6)


def test_a_killed_run_still_exports_its_average(tmp_path: Path) -> None:
    """A hook under a name of the user's, and a run that has only its exports left to do."""
    options = (*RUN, "+hook.average._target_=components.hooks.EMA", "run.export=true", "run.max_steps=2")
    run = run_here(tmp_path, *options)
    expected = load_file(run / "average" / "model.safetensors")
    shutil.rmtree(run / "average")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"ended": None, "final_step": None}))
    assert run_here(tmp_path, *options, "checkpoint.resume=auto") == run
    assert equal(load_file(run / "average" / "model.safetensors"), expected)


def test_an_average_that_no_checkpoint_has_is_not_exported(tmp_path: Path) -> None:
    options = (*RUN, "run.max_steps=1", "checkpoint.save_every=1")
    run = run_here(tmp_path, *options)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"ended": None, "final_step": None}))
    assert run_here(tmp_path, *options, "hook=ema", "checkpoint.resume=auto") == run
    assert not (run / "ema").exists()


NORMS = (*RUN, "hook=[gradient_stats]", "optimizer.max_grad_norm=0.1", "run.max_steps=2")


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("norms"), *NORMS)


def test_gradient_norms_by_layer_add_up(norms: Path) -> None:
    found = rows(norms, "grad_norm/model.layers.1")
    for row, step in zip(found, rows(norms, "train/grad_norm"), strict=True):
        squares = [value**2 for key, value in row.items() if key.startswith("grad_norm/")]
        assert sum(squares) ** 0.5 == pytest.approx(step["train/grad_norm"], rel=1e-9)
    assert set(found[0]) == {
        *("step", "grad_norm/model.embed_tokens", "grad_norm/model.norm"),
        *(f"grad_norm/model.layers.{number}" for number in range(2)),
    }


@pytest.mark.parametrize(
    "layout",
    [
        *("tp2pp2", "fsdp2_tp2", "tp2 optimizer=muon"),
        "megatron_dp2 parallelism.distributed_optimizer=true",
    ],
)
def test_gradient_norms_do_not_depend_on_the_layout(norms: Path, tmp_path: Path, layout: str) -> None:
    other = run_here(tmp_path, *NORMS, *f"parallelism={layout}".split())
    expected, found = (rows(run, "grad_norm/model.norm")[0]["grad_norm/model.norm"] for run in (norms, other))
    assert found == pytest.approx(expected, rel=1e-5)


def test_completions_after_every_evaluation(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Return", "id": 1}\n{"prompt": "The"}\n')
    hook = ("hook=[samples]", f"hook.samples.prompts={prompts}", "hook.samples.max_new_tokens=3")
    lora = ("adapter=lora", "adapter.dropout=0.5", "parallelism=tp2")
    for name, options in {"full": (), "lora": lora}.items():
        run = run_here(tmp_path / name, *RUN, *hook, *options, "run.eval_every=2")
        written = sorted((run / "completions").iterdir())
        assert [path.name for path in written] == ["step_00000002.jsonl", "step_00000004.jsonl"]
        first, second = map(json.loads, written[0].read_text().splitlines())
        assert (first["prompt"], first["id"], first["finish"]) == ("Return", 1, "length")
        assert set(second) == {"prompt", "completion", "finish"}
    without = run_here(tmp_path / "without", *RUN, *lora, "run.eval_every=2")
    assert curve(run) == curve(without), "what is dropped does not depend on the hook"


class FullDisk(Samples):
    """A hook whose work on rank 0 alone fails."""

    def _write(self, run: HookRun, export: Path) -> None:  # noqa: ARG002
        raise OSError("no space left")


def test_a_hook_that_fails_on_one_rank_is_left_out_on_all(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The"}\n')
    hook = ("hook=[samples]", f"hook.samples.prompts={prompts}", "hook.samples.on_error=warn")
    own = ("hook.samples._target_=tests.e2e.test_hooks.FullDisk", "parallelism=fsdp2", "parallelism.dp=2")
    run = run_here(tmp_path / "run", *RUN, *hook, *own, "run.eval_every=2")
    assert [row["step"] for row in rows(run, "eval/loss")] == [2, 4]
    assert (run / "train.log").read_text().count("no space left; it is left out from here on") == 1


def test_prompts_have_the_system_turn_of_the_data() -> None:
    data = ("run.name=x", "data=files", "data.train=chats.jsonl", "data.default_system=Count.")
    variables = "data.chat_template_kwargs={style: brief}"
    config = composed((*data, variables, "hook=samples", "hook.samples.prompts=prompts.jsonl"))
    with mock.patch("components.hooks.samples.read_prompts") as read:
        build_experiment(config, ConfigSources()).hook["samples"].check("samples")
    options = RecordOptions(default_system="Count.", chat_template_kwargs={"style": "brief"})
    read.assert_called_with("prompts.jsonl", options)
    other = composed(
        ("run.name=x", "hook=samples", "hook.samples.prompts=prompts.jsonl")
    )  # the demo data has no such keys
    assert other["hook"]["samples"]["default_system"] is None


class Counted(Hook):
    """A hook that logs a tensor."""

    def after_step(self, run: HookRun, *_: object) -> None:
        run.log({"mine/step": torch.tensor(run.state.step)})


def test_two_hooks_of_a_class_have_files_of_their_own(tmp_path: Path) -> None:
    """More prompts than ``BATCH_SIZE`` are completed one batch after the other."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "The"}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"prompt": "A"}')
    first = ("hook=[samples]", f"hook.samples.prompts={tmp_path}/a.jsonl", "hook.samples.max_new_tokens=1")
    more = ("_target_=components.hooks.Samples", f"prompts={tmp_path}/b.jsonl", "max_new_tokens=1")
    counted = "+hook.counted._target_=tests.e2e.test_hooks.Counted"
    second = (f"+hook.more.{word}" for word in more)
    with mock.patch("components.models.generate.complete", wraps=complete) as batches:
        run = run_here(tmp_path / "run", *RUN, *first, *second, counted, "run.max_steps=1")
    assert [len(call.args[2]) for call in batches.call_args_list] == [8, 1, 1]
    for folder, prompts in (("completions", ["The"] * 9), ("completions/more", ["A"])):
        found = (run / folder / "step_00000001.jsonl").read_text().splitlines()
        assert [json.loads(row)["prompt"] for row in found] == prompts
    assert [row["mine/step"] for row in rows(run, "mine/step")] == [1.0]


def test_a_hook_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/hooks.md, on one and on two ranks."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCS, flags=re.DOTALL)
    (tmp_path / "my_hooks.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = ("+hook.mine._target_=my_hooks.StopAtLoss", "run.max_steps=20")
    whole = run_here(tmp_path / "whole", *RUN, "run.max_steps=20")
    low = rows(whole, "train/loss")[3]["train/loss"] + 1e-6
    run = run_here(
        tmp_path / "mine", *RUN, *mine, f"+hook.mine.loss={low}", "parallelism=fsdp2", "parallelism.dp=2"
    )
    assert [row["step"] for row in rows(run, "train/loss")] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(run, "eval/loss")] == [4]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
    command = re.findall(r"^python -m runner (.*my_hooks.*)$", DOCS, flags=re.MULTILINE)[0].split()
    documented = run_here(tmp_path / "documented", *RUN, "run.max_steps=20", *command)
    assert (
        rows(documented, "train/loss")[-1]["train/loss"]
        < 8.9
        < rows(documented, "train/loss")[-2]["train/loss"]
    )
    capsys.readouterr()
    own = (f"run.output_dir={tmp_path}/refused", *RUN, *mine)
    assert call_here(*own) == 2
    assert re.search(r"hook\.mine\.loss.* missing", capsys.readouterr().err)
    assert call_here(*own, "+hook.mine.loss=1", "hook.mine._target_=builtins.dict") == 2
    assert "is not a Hook; name a subclass of components.contracts.hook.Hook" in capsys.readouterr().err
    assert call_here(*own, "+hook.mine.loss=1", "run.evaluate_only=true") == 2
    assert "hook.mine: run.evaluate_only trains nothing to observe; leave it out" in capsys.readouterr().err


def test_a_hook_ends_the_run_before_or_between_logged_steps(tmp_path: Path) -> None:
    last = "+hook.mine._target_=tests.e2e.own_hooks.StopAt"
    early = run_here(tmp_path / "early", *RUN, last, "+hook.mine.step=0", "run.eval_at_end=false")
    record = json.loads((early / "run.json").read_text())
    assert (record["ended"], record["final_step"]) == ("completed", 0)
    between = run_here(tmp_path / "between", *RUN, last, "+hook.mine.step=2", "run.log_every=100")
    assert [row["step"] for row in rows(between, "train/loss")] == [2]
    record = json.loads((between / "run.json").read_text())
    assert record["results"]["last"]["mine/steps"] == 2, "a metric that is logged at the end"


def test_a_hook_does_not_change_the_curve(tmp_path: Path) -> None:
    plain = curve(run_here(tmp_path / "plain", *RUN))
    observed = run_here(tmp_path / "observed", *RUN, "hook=[ema,gradient_stats]")
    assert [row for row in curve(observed) if "train/loss" in row or "eval/loss" in row] == plain
