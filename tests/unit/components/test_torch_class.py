"""What a trial shows about a torch optimizer class, and the classes that it refuses."""

import inspect
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.optimizers import TorchClass, described, torch_optimizer
from tests.distributed.cases import fsdp2, megatron, spec
from tests.distributed.optimizer_class_cases import Lion
from tests.unit.components.test_optimizers import network, train


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, which a shard does not know."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "elementwise", "moments"),
    [
        (torch.optim.RAdam, True, ("exp_avg", "exp_avg_sq")),
        (torch.optim.Adagrad, True, ("sum",)),
        (torch.optim.Rprop, True, ("prev", "step_size")),
        (torch.optim.SGD, True, ()),
        (torch.optim.Adafactor, False, ()),
        (AdamWScheduleFree, True, ("exp_avg_sq", "z")),
        (Lion, True, ("exp_avg",)),
        (Normed, False, ()),
    ],
)
def test_what_a_trial_shows(kind: Any, elementwise: bool, moments: tuple[str, ...]) -> None:
    description = described(kind)(lr=1e-2)
    assert description.is_elementwise is elementwise
    assert description.moments == moments


def test_a_trial_leaves_the_random_stream() -> None:
    before = torch.get_rng_state()
    assert described(torch.optim.RAdam)(lr=1e-2).is_elementwise
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_and_other_tensors_are_found() -> None:
    assert TorchClass(torch.optim.Adafactor, 1e-2).state.whole == ("col_var", "row_var", "variance")
    assert TorchClass(torch.optim.NAdam, 1e-2).state.scalars == ("mu_product", "step")
    found = TorchClass(AdamWScheduleFree, 1e-2).state.group_scalars
    assert found == ("k", "lr_max", "scheduled_lr", "weight_sum")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.RAdam, {"betas": [0.8, 0.9], "eps": 1e-3}),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
    ],
)
def test_equals_the_class_with_decay_on_matrices_only(kind: Any, options: dict[str, Any]) -> None:
    model, plain = network(), network()
    ours = train(model, torch_optimizer(TorchClass(kind, 0.05, 0.5, None, options), model.named_parameters()))
    groups = [
        {"params": [plain[0].weight, plain[2].weight], "weight_decay": 0.5},
        {"params": [plain[0].bias, plain[1].weight, plain[1].bias], "weight_decay": 0.0},
    ]
    expected = train(plain, kind(groups, lr=0.05, **options))
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_the_arguments_of_the_class_are_keys() -> None:
    keys = inspect.signature(described(torch.optim.RAdam)).parameters
    assert keys.keys() >= {"lr", "betas", "eps", "weight_decay", "max_grad_norm"}
    assert "params" not in keys
    assert described(nn.Linear) is nn.Linear


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot update a matrix and a vector .*parameter groups.* choose"),
        (torch.optim.SparseAdam, {}, "SparseAdam cannot update .*dense gradients"),
        (torch.optim.Muon, {}, "Muon cannot update .*only supports 2D parameters"),
        (torch.optim.RAdam, {"betas": [2.0, 0.9]}, "RAdam cannot update .*beta.*2.0.* Change its options"),
        (torch.optim.Rprop, {"weight_decay": 0.1}, "optimizer.weight_decay: .*Rprop does not have it"),
        (torch.optim.RAdam, {"lr": -1.0}, "optimizer.lr: must be a number of at least 0"),
    ],
)
def test_refuses_what_cannot_train(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        described(kind)(**{"lr": 1e-2} | options)


def test_refuses_a_class_without_a_learning_rate() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    with pytest.raises(ConfigError, match="Fixed has no argument lr, which the scheduler sets"):
        described(Fixed)


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        (fsdp2(2), 2, "updates a part of a matrix unlike the matrix, .* one of 2 parts; use"),
        (fsdp2(1, tp=2), 2, "one of 2 parts"),
        (megatron(), 1, "is for FSDP2, .*use parallelism=fsdp2"),
    ],
)
def test_layouts_that_a_class_cannot_train_in(layout: Any, world_size: int, message: str) -> None:
    options = EngineOptions(dtype=torch.float32, device="cpu")
    model, description = spec("qwen3").meta_model, TorchClass(torch.optim.Adafactor, 1e-2)
    with pytest.raises(ConfigError, match=message):
        layout.check(model, description, options, world_size=world_size)
    copies = FSDP2(dp=2, default_dp=1, reshard_after_forward=True, dp_replicate=2)
    copies.check(model, description, options, world_size=2)
