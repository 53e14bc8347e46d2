"""What a trial shows about a torch optimizer class, and the classes that it refuses."""

import inspect
import math
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from bitsandbytes.optim import Lion as bitsandbytes_lion
from schedulefree import AdamWScheduleFree
from torch import nn

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.optimizers import AdamW, Muon, TorchClass, WeightGroup, torch_optimizer
from components.targets import described
from tests.distributed.cases import fsdp2, megatron, spec
from tests.distributed.optimizer_class_cases import Adapted, Lion
from tests.unit.components.test_optimizers import network, train


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, which a shard does not know."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class NormedTogether(torch.optim.SGD):
    """Divides the gradients by their common norm, which no weight knows."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


class TensorRate(torch.optim.SGD):
    """Has its learning rate in a tensor, as classes of torchao do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])


class Evaluated(torch.optim.Adafactor):
    """Has other weights for evaluations, and row sums."""

    def eval(self) -> None: ...

    def train(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "scope", "moments"),
    [
        (torch.optim.RAdam, "element", ("exp_avg", "exp_avg_sq")),
        (torch.optim.Adagrad, "element", ("sum",)),
        (torch.optim.Rprop, "element", ("prev", "step_size")),
        (torch.optim.SGD, "element", ()),
        (torch.optim.Adafactor, "matrix", ()),
        (AdamWScheduleFree, "element", ("exp_avg_sq", "z")),
        (Lion, "element", ("exp_avg",)),
        (AdamW8bit, "matrix", ()),
        (bitsandbytes_lion, "element", ("state1",)),
        (Normed, "matrix", ()),
        (NormedTogether, "model", ()),
        (Adapted, "model", ()),
    ],
)
def test_what_a_trial_shows(kind: Any, scope: str, moments: tuple[str, ...]) -> None:
    description = described(kind)(lr=1e-2)
    assert description.scope == scope
    assert description.moments == moments


@pytest.mark.parametrize(
    ("kind", "scope"), [(Normed, "matrix"), (NormedTogether, "model"), (Lion, "element")]
)
def test_a_small_rate_hides_nothing_in_a_trial(kind: Any, scope: str) -> None:
    assert described(kind)(lr=1e-7).scope == scope


def test_a_trial_leaves_the_random_stream() -> None:
    before = torch.get_rng_state()
    assert described(torch.optim.RAdam)(lr=1e-2).scope == "element"
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_and_other_tensors_are_found() -> None:
    assert TorchClass(torch.optim.Adafactor, 1e-2).state.whole == ("col_var", "row_var", "variance")
    assert TorchClass(torch.optim.NAdam, 1e-2).state.scalars == ("mu_product", "step")
    found = TorchClass(AdamWScheduleFree, 1e-2).state.group_scalars
    assert found == {"k": int, "lr_max": float, "scheduled_lr": float, "weight_sum": float}
    assert TorchClass(Adapted, 1e-2).state.group_scalars == {"d": float, "k": int, "total": float}
    assert TorchClass(Adapted, 1e-2).state.whole == ("norm", "rows")


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
    ours = train(
        model, torch_optimizer(TorchClass(kind, 0.05, 0.5, options=options), model.named_parameters())
    )
    groups = [
        {"params": [plain[0].weight, plain[2].weight], "weight_decay": 0.5},
        {"params": [plain[0].bias, plain[1].weight, plain[1].bias], "weight_decay": 0.0},
    ]
    expected = train(plain, kind(groups, lr=0.05, **options))
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_no_decay_is_not_the_default_of_the_class() -> None:
    model = network()
    optimizer = torch_optimizer(TorchClass(torch.optim.AdamW, 0.05), model.named_parameters())
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    assert torch.optim.AdamW(model.parameters()).defaults["weight_decay"] > 0


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
        (torch.optim.RAdam, {"betas": [0.9]}, "RAdam cannot update .*IndexError.* Change its options"),
        (AdamWScheduleFree, {"betas": [2, 3]}, "optimizer.betas: must be at least 0 and below 1, got .2, 3"),
        (AdamWScheduleFree, {"eps": -1.0}, "optimizer.eps: must be at least 0, got -1"),
        (AdamWScheduleFree, {"eps": math.nan}, "optimizer.eps: must be at least 0, got nan"),
        (AdamWScheduleFree, {"warmup_steps": -5}, "optimizer.warmup_steps: must be at least 0, got -5"),
        (torch.optim.SGD, {"momentum": math.inf}, "SGD makes weights infinite or NaN with these options"),
        (torch.optim.Rprop, {"weight_decay": 0.1}, "optimizer.weight_decay: .*Rprop does not have it"),
        (torch.optim.RAdam, {"lr": -1.0}, "optimizer.lr: must be a number of at least 0"),
        (
            Evaluated,
            {},
            "Evaluated has other weights for evaluations, and keeps col_var, row_var, variance of",
        ),
        (
            TensorRate,
            {},
            "TensorRate keeps lr as a tensor, but the scheduler sets a number",
        ),
        (AdamW8bit, {"min_8bit_size": 6145}, "optimizer.min_8bit_size: is 6145, .*use at most 6144"),
    ],
)
def test_refuses_what_cannot_train(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        described(kind)(**{"lr": 1e-2} | options)


@pytest.mark.parametrize("key", ["a list", "a tensor of a group", "a number of a group"])
def test_refuses_state_that_checkpoints_cannot_hold(key: str) -> None:
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for number, group in enumerate(self.param_groups):
                value = {"a tensor of a group": torch.ones(1), "a number of a group": number}
                (group if key in value else self.state[group["params"][0]])[key] = value.get(key, [])
            return super().step(closure)

    with pytest.raises(ConfigError, match=rf"Keeping keeps {key}, which checkpoints cannot hold.* Choose"):
        described(Keeping)(lr=1e-2)


def test_refuses_a_class_whose_arguments_it_cannot_set() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    class Clipping(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1, max_grad_norm: float = 1.0) -> None:
            super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm})

    with pytest.raises(ConfigError, match="Fixed has no argument lr, which the scheduler sets"):
        described(Fixed)
    with pytest.raises(ConfigError, match="Clipping has an argument max_grad_norm of its own"):
        described(Clipping)


@pytest.mark.parametrize(
    ("layout", "description", "message"),
    [
        (
            fsdp2(2),
            TorchClass(NormedTogether, 1e-2),
            "NormedTogether updates a weight by what it knows of others",
        ),
        (fsdp2(1, tp=2), TorchClass(NormedTogether, 1e-2), "use parallelism=single"),
        (fsdp2(2, cpu_offload=True), Muon(), "parallelism.cpu_offload: .*set parallelism.cpu_offload=false"),
        (
            megatron(dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
            Muon(),
            "parallelism.overlap_param_gather: is an option of Megatron's own optimizers, and muon",
        ),
        (
            megatron(dp=2),
            TorchClass(AdamWScheduleFree, 1e-2),
            "AdamWScheduleFree has other weights for evaluations",
        ),
    ],
)
def test_layouts_that_an_optimizer_cannot_train_in(layout: Any, description: Any, message: str) -> None:
    options = EngineOptions(dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=message):
        layout.check(spec("qwen3").meta_model, description, options, world_size=2)


def test_query_and_key_may_be_in_different_groups_with_muon() -> None:
    """Megatron keeps them in one tensor, and its own optimizers update that as a whole."""
    options = EngineOptions(dtype=torch.float32, device="cpu")
    apart = (WeightGroup("*.q_proj.*", lr=1e-2),)
    megatron(dp=2).check(spec("qwen3").meta_model, Muon(groups=apart), options, world_size=2)
    with pytest.raises(ConfigError, match="are in one tensor in this layout"):
        megatron(dp=2).check(spec("qwen3").meta_model, AdamW(groups=apart), options, world_size=2)


def test_one_rank_trains_with_any_class() -> None:
    options = EngineOptions(dtype=torch.float32, device="cpu")
    model, description = spec("qwen3").meta_model, TorchClass(NormedTogether, 1e-2)
    fsdp2().check(model, description, options, world_size=1)
    with pytest.raises(ConfigError, match=r"set parallelism\.cpu_offload=false"):
        fsdp2(cpu_offload=True).check(model, description, options, world_size=1)


@pytest.mark.parametrize(("kind", "name"), [(AdamWScheduleFree, "lr_max"), (torch.optim.ASGD, "eta")])
def test_numbers_that_depend_on_the_rate_allow_no_group_with_its_own(kind: Any, name: str) -> None:
    decay, rate = (WeightGroup(match="*.embed_tokens.*", **{key: 1e-3}) for key in ("weight_decay", "lr"))
    described(kind)(lr=1e-2, groups=(decay,))
    described(torch.optim.RAdam)(lr=1e-2, groups=(rate,))
    with pytest.raises(ConfigError, match=rf"optimizer\.groups: .* computes .*{name}"):
        described(kind)(lr=1e-2, groups=(rate,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"betas": (0.9, 1.0)}, "optimizer.betas"),
        ({"ns_steps": 100}, "optimizer.ns_steps: must be below 100, got 100"),
        ({"momentum": -0.1}, "optimizer.momentum: must be a number of at least 0"),
        ({"adamw_lr": float("inf")}, "optimizer.adamw_lr"),
        ({"adamw_lr": 1e-3, "lr": 0.0}, "optimizer.adamw_lr: follows the schedule of optimizer.lr"),
    ],
)
def test_muon_checks_its_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon(**changes)


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    assert Muon().orthogonalises("model.layers.0.mlp.experts.3.down_proj.weight", 2)
    for name, ndim in (("model.embed_tokens.weight", 2), ("lm_head.weight", 2), ("model.norm.weight", 1)):
        assert not Muon().orthogonalises(name, ndim)
    assert not Muon(adamw_for=("*router*",)).orthogonalises("model.layers.0.router.weight", 2)


def test_heads_are_orthogonalised_by_themselves() -> None:
    """The oracle is torch.optim.Muon on the heads as parameters of their own, and on another matrix."""
    torch.manual_seed(0)
    shapes = {"self_attn.q_proj.weight": (24, 16), "self_attn.o_proj.weight": (16, 24)}
    ours = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    query, output = (p.detach().clone() for p in ours.values())
    heads = [torch.nn.Parameter(rows.clone()) for rows in query.split(8)]
    theirs = [*heads, torch.nn.Parameter(output)]
    oracle = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer = torch_optimizer(Muon(lr=1e-2, weight_decay=0.1, head_dim=8), ours.items())
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in ours.values()]
        for parameter, gradient in zip(ours.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        for parameter, gradient in zip(theirs, [*gradients[0].split(8), gradients[1]], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        oracle.step()
    first, second = ours.values()
    assert torch.equal(first, torch.cat(heads))
    assert torch.equal(second, theirs[-1])
    assert [state["momentum_buffer"].shape for state in optimizer.state.values()] == [
        *map(torch.Size, shapes.values())
    ]
