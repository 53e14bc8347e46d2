"""Optimizer descriptions build the expected torch optimizers, sharded or not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from components.contracts.errors import ConfigError
from components.optimizers import (
    SGD,
    AdamW,
    Optimizer,
    WeightGroup,
    check_matches,
    decays,
    torch_optimizer,
    weight_options,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float = 0.05) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(4):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.embed_tokens.weight", 2, True),
        ("model.layers.0.mlp.experts.down_proj", 3, True),
        ("model.layers.0.self_attn.q_proj.bias", 1, False),
        ("model.layers.0.input_layernorm.weight", 1, False),
        ("some.matrix.bias", 2, False),
        ("scale", 0, False),
    ],
)
def test_decays(name: str, ndim: int, expected: bool) -> None:
    assert decays(name, ndim) is expected


ALL: list[Optimizer] = [
    AdamW(betas=(0.8, 0.9), weight_decay=0.5),
    AdamW(eps=1e-3),
    SGD(weight_decay=0.5),
    SGD(nesterov=True),
    SGD(momentum=0.0),
]


@pytest.mark.parametrize("description", ALL, ids=str)
def test_equals_torch_with_decay_on_matrices_only(description: Optimizer) -> None:
    model, plain = network(), network()
    ours = train(model, torch_optimizer(description, model.named_parameters()))
    kind = torch.optim.AdamW if isinstance(description, AdamW) else torch.optim.SGD
    keys = ("betas", "eps") if isinstance(description, AdamW) else ("momentum", "nesterov")
    settings: dict[str, Any] = {key: getattr(description, key) for key in keys}
    groups = [
        {"params": [plain[0].weight, plain[2].weight], "weight_decay": description.weight_decay},
        {"params": [plain[0].bias, plain[1].weight, plain[1].bias], "weight_decay": 0.0},
    ]
    expected = train(plain, kind(groups, lr=0.05, foreach=False, **settings))
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("description", ALL, ids=str)
def test_sharded_equals_unsharded(description: Optimizer, one_rank: None) -> None:
    model, sharded = network(), network()
    fully_shard(sharded[0])
    fully_shard(sharded)
    expected = train(model, torch_optimizer(description, model.named_parameters()))
    found = train(sharded, torch_optimizer(description, sharded.named_parameters()))
    assert any(isinstance(p, DTensor) for p in sharded.parameters())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("description", ALL, ids=str)
def test_moments_are_what_torch_keeps(description: Optimizer) -> None:
    model = network()
    optimizer = torch_optimizer(description, model.named_parameters())
    train(model, optimizer)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors = {name for name, value in state.items() if value is not None and name != "step"}
        assert tensors == set(description.moments)
        assert all(state[name].shape == parameter.shape for name in tensors)


def test_groups_have_their_own_rate_and_decay() -> None:
    groups = (
        WeightGroup("0.*", lr=0.1),
        WeightGroup("*.bias", weight_decay=0.7),
        WeightGroup("0.bias", lr=0.0),
    )
    description = AdamW(lr=0.05, weight_decay=0.5, groups=groups)
    found = {
        name: (options.weight_decay, options.lr_scale)
        for name, ndim in (("0.weight", 2), ("0.bias", 1), ("1.bias", 1), ("1.weight", 1), ("2.weight", 2))
        for options in [weight_options(description, name, ndim)]
    }
    assert found == {
        "0.weight": (0.5, 2.0),
        "0.bias": (0.0, 2.0),  # the first group that matches
        "1.bias": (0.7, 1.0),
        "1.weight": (0.0, 1.0),
        "2.weight": (0.5, 1.0),
    }
    assert weight_options(replace(description, groups=groups[2:]), "0.bias", 1).lr_scale == 0


@pytest.mark.parametrize(
    ("groups", "tensors", "message"),
    [
        ([WeightGroup("*.q.*")], [["a.k.weight"]], "optimizer.groups.0..match: .* a name is like a.k.weight"),
        ([WeightGroup("*.q.*", 1.0)], [["a.q.weight", "a.k.weight"]], "use one group for both"),
        (
            [WeightGroup("*"), WeightGroup("*.q.*")],
            [["a.q.weight"]],
            r"groups.1..match: '\*.q.\*' .*put it first",
        ),
    ],
)
def test_patterns_are_checked(groups: Any, tensors: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_matches(groups, tensors)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (lambda: AdamW(groups=(WeightGroup("*", lr=-1.0),)), "optimizer.groups.0..lr: must be"),
        (
            lambda: SGD(groups=(WeightGroup("*", weight_decay=-1.0),)),
            "optimizer.groups.0..weight_decay: must",
        ),
        (lambda: AdamW(lr=0.0, groups=(WeightGroup("*", lr=1.0),)), "set optimizer.lr above 0"),
    ],
)
def test_numbers_of_groups_are_checked(description: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        description()


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch_optimizer(AdamW(), model.named_parameters())
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["2.weight"],
        ["1.weight", "1.bias"],
    ]


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        (AdamW, {"lr": -1e-3}, "optimizer.lr"),
        (AdamW, {"lr": float("nan")}, "optimizer.lr"),
        (AdamW, {"betas": (0.9, 1.0)}, "optimizer.betas"),
        (AdamW, {"eps": -1.0}, "optimizer.eps"),
        (AdamW, {"weight_decay": -0.1}, "optimizer.weight_decay"),
        (SGD, {"max_grad_norm": -1.0}, "optimizer.max_grad_norm"),
        (SGD, {"momentum": -0.5}, "optimizer.momentum"),
        (SGD, {"nesterov": True, "momentum": 0.0}, "optimizer.nesterov"),
    ],
)
def test_refuses_impossible_values(kind: type, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        kind(**settings)


@pytest.mark.parametrize("value", [None, 0.0, 1.0])
def test_clipping_can_be_off(value: float | None) -> None:
    assert AdamW(max_grad_norm=value).max_grad_norm == value
