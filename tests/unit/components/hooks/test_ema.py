"""The memory of averages of weights."""

from types import SimpleNamespace
from typing import Any

import torch

from components.checkpoint.flat_shard import FlatChunk, FlatShard
from components.hooks import EMA


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
