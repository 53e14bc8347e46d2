"""Each rank of a layout holds the right shards, checked in one process, as building a model sends nothing."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.optim import Lion
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.mesh import local_shard, shard_slices
from components.engines.fsdp2.param_views import ParamView
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer
from components.engines.shared import process_group
from components.optimizers import AdamW, TorchClass
from tests.distributed.cases import fsdp2, make_engine, spec


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list of the rank and the world size of the next engine, which a test may change."""
    now = [0, 1]

    def join(_: str) -> torch.device:
        dist.init_process_group("fake", store=FakeStore(), rank=now[0], world_size=now[1])
        return torch.device("cpu")

    monkeypatch.setattr(process_group, "init_process_group", join)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield now
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("on", [fsdp2(2, tp=2, cp=2), fsdp2(4, dp_replicate=2, tp=2)], ids=str)
def test_ranks_hold_every_element_as_often_as_there_are_copies(rank: list[int], on: FSDP2) -> None:
    """The number of copies is right even if neither tp nor the shards divide the vocabulary size."""
    weights = spec("uneven").weights(0)
    world, held = on.world_size({}, 0), dict[str, Tensor]()
    parts: dict[str, set[str]] = defaultdict(set)
    for rank[:] in ([r, world] for r in range(world)):
        engine = make_engine("uneven", on=on)
        for name, parameter in engine.weights.items():
            here = shard_slices(parameter)
            assert local_shard(parameter).shape == tuple(s.stop - s.start for s in here)
            held.setdefault(name, torch.zeros(parameter.shape))[here] += 1
            parts[name].add(str(here))
            if local_shard(parameter).numel():
                assert torch.equal(local_shard(parameter), weights(name, here))
        engine.close()
    for name, count in held.items():
        whole_on_tp = "norm" in name
        copies = on.dp_replicate * (on.tp if whole_on_tp else 1)
        assert (count == copies).all(), name
        assert len(parts[name]) > 1


def test_groups_of_blocks_begin_the_gathers_of_others(
    rank: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers in groups of two, and one for a later token, which runs in some passes only."""
    rank[:] = [0, 2]
    begun: dict[str, list[tuple[FSDPModule, list[FSDPModule]]]] = {"forward": [], "backward": []}
    for way, calls in begun.items():
        keep = partialmethod(lambda module, others, calls: calls.append((module, others)), calls=calls)
        monkeypatch.setattr(FSDPModule, f"set_modules_to_{way}_prefetch", keep)
    engine = make_engine("deep", on=fsdp2(2, blocks_per_group=2, prefetch_groups=1), mtp_layers=1)
    layers = list(engine.scorer.lm.base_model.layers)
    found = {
        way: {layers.index(module): [*map(layers.index, others)] for module, others in calls}
        for way, calls in begun.items()
    }
    engine.close()
    assert found == {"forward": {0: [2], 2: [4], 4: []}, "backward": {0: [], 2: [0], 4: [2]}}


class OfOurOwn(LlamaForCausalLM):
    """A model class as a model folder with its own code may define it."""


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_model_without_a_plan_is_refused_under_tp_alone(kind: str) -> None:
    model = spec(kind).build(spec(kind).config())
    if kind == "llama":
        with torch.device("meta"):
            model = OfOurOwn(model.config)
    options = EngineOptions(torch.float32, "cpu")
    message = rf"parallelism\.tp: {kind} \(.*, deepseek_v3; use parallelism=fsdp2 or parallelism=hsdp"
    with pytest.raises(ConfigError, match=message):
        fsdp2(tp=2).check(model, AdamW(), options, world_size=2)
    fsdp2(cp=2).check(model, AdamW(), options, world_size=2)


def test_a_vocabulary_that_nothing_divides_is_refused() -> None:
    """161 rows cannot be divided by two, nor 32 columns by three."""
    model = spec("uneven").build(spec("uneven").config())
    options = EngineOptions(torch.float32, "cpu")
    message = r"parallelism\.dp: tp = 2 .* vocab_size = 161 .* 32 columns .* 3 ranks .* let these be 2 or 4"
    with pytest.raises(ConfigError, match=message):
        fsdp2(3, tp=2).check(model, AdamW(), options, world_size=6)
    fsdp2(4, tp=2).check(model, AdamW(), options, world_size=8)
    fsdp2(3).check(model, AdamW(), options, world_size=3)


class NoneEmpty(torch.optim.Adam):
    """Refuses empty parameters, as kernels of bitsandbytes do."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.numel() for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_an_optimizer_gets_no_empty_shard() -> None:
    weights = {"full": nn.Parameter(torch.ones(2, 3)), "empty": nn.Parameter(torch.ones(0, 3))}
    views = [ParamView(name, weight, lambda tensor: tensor, True) for name, weight in weights.items()]
    optimizer = ShardedOptimizer(TorchClass(NoneEmpty, 1e-2), weights, views)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step(1e-2)
    assert weights["full"].max() < 1
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert saved["exp_avg/empty"].shape == (0, 3)
    with optimizer.loading(saved) as tensors:
        assert tensors.keys() == saved.keys()


def test_constants_of_groups_may_be_missing_in_a_checkpoint() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    views = [ParamView("weight", weight, lambda tensor: tensor, True)]
    optimizer = ShardedOptimizer(TorchClass(Lion, 1e-2), {"weight": weight}, views)
    saved = optimizer.tensors().keys() - {"optimizer_group/eps"}
    with optimizer.loading(saved) as tensors:
        assert tensors.keys() == saved
    assert optimizer.optimizer.param_groups[0]["eps"] == 0
