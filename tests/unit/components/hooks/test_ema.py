"""The memory of averages of weights, and the step that is reported of an average."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec, patch

import pytest
import torch

from components.checkpoint.flat_shard import FlatChunk, FlatShard
from components.checkpoint.folder import CheckpointMeta, commit
from components.hooks import EMA
from components.models import ModelSpec


def test_fused_weights_are_averaged_once() -> None:
    """Shards of q, k and v are views of one tensor, in which each has its own chunk."""
    flat, other = torch.arange(6.0), torch.full((2,), 8.0)
    names = ("q_proj", "k_proj", "v_proj")
    fused = {
        f"model/{name}": FlatShard.of(flat, torch.Size([2]), [FlatChunk((0,), (2,), start=2 * i)])
        for i, name in enumerate(names)
    }
    engine = SimpleNamespace(tensors=lambda **_: {**fused, "model/o_proj": other})
    run: Any = SimpleNamespace(name="ema", adapter=None, engine=engine, resumed_from=None)
    hook = EMA(decay=0.75)
    hook.begin(run)
    flat += 4
    other += 4
    hook.after_step(run, SimpleNamespace(skipped=False))  # type: ignore[arg-type]
    averages = hook.tensors()
    assert {*averages} == {*names, "o_proj"}
    assert len({tensor.data_ptr() for tensor in averages.values()}) == 2
    for i, name in enumerate(names):
        shard = averages[name]
        assert isinstance(shard, FlatShard)
        assert shard.chunks == fused[f"model/{name}"].chunks
        assert shard.as_subclass(torch.Tensor)[2 * i : 2 * i + 2].tolist() == [2.0 * i + 1, 2.0 * i + 2]
    assert averages["o_proj"].tolist() == [9.0, 9.0]


@pytest.mark.parametrize(("saved", "name"), [(4, "step_00000004"), (4, "renamed"), (6, "step_00000006")])
def test_the_export_names_the_step_of_the_checkpoint(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, saved: int, name: str
) -> None:
    run: Any = SimpleNamespace(
        name="ema", adapter=None, folder=Path("run"), seed=0, dtype=torch.float32, is_main=True
    )
    run.model, run.state = create_autospec(ModelSpec, instance=True), SimpleNamespace(step=6)
    run.engine = SimpleNamespace(barrier=lambda: None)
    (checkpoint := tmp_path / name).mkdir()
    commit(checkpoint, CheckpointMeta({"step": saved}, {}, model_only=False, files={}))
    hook = EMA()
    hook.after_save(run, checkpoint)
    with patch("components.hooks.ema.CheckpointModel"), caplog.at_level("INFO"):
        hook.end(run, completed=True)
    assert f"step {saved}  exported the average" in caplog.text
    assert ("hook.ema: the average is that of step 4" in caplog.text) == (saved == 4)
