"""Any subclass of ``torch.optim.Optimizer``: its arguments, and the kinds of its state, found in a trial."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from components.contracts.errors import ConfigError, check_at_least_zero
from components.contracts.json_types import Config
from components.optimizers.adamw_sgd import Scope
from components.optimizers.weight_groups import ParamGroup, WeightGroup, check_groups

SHARED = ("lr", "weight_decay", "max_grad_norm", "groups")
"""Config keys that every optimizer has."""
SHAPE = (96, 64)
"""Shape of the matrix in a trial. It has more than 4096 elements, the size from which 8-bit optimizers
quantise their state."""
TRIAL_LR = 1e-2
"""Least learning rate of the trials that find the scope: after smaller updates, all results look equal."""

StateKind = Literal["moment", "scalar", "other"]
"""Kind of a value in an optimizer's state: a floating-point tensor of the parameter's shape (``moment``), a
number (``scalar``), or anything else."""


@dataclass(frozen=True)
class StateKinds:
    """Names of an optimizer's state after an update, by how a checkpoint stores it."""

    moments: tuple[str, ...] = ()
    """Floating-point tensors of the parameter's shape."""
    scalars: tuple[str, ...] = ()
    """Numbers per parameter, such as ``step``, that are equal for all parameters."""
    group_scalars: Mapping[str, type[int | float]] = field(default_factory=dict)
    """Numbers in ``param_groups`` that updates change or that are not arguments, by name, with their types.
    The latter may change only in a later update."""
    group_constants: tuple[str, ...] = ()
    """Those of ``group_scalars`` that the trial updates did not change."""
    whole: tuple[str, ...] = ()
    """Tensors of other shapes or dtypes, such as the row sums of Adafactor, and other numbers."""


@dataclass(frozen=True)
class TorchClass:
    """A subclass of ``torch.optim.Optimizer`` and its arguments.

    Raises:
        ConfigError: if a number is out of range, weight decay is set but the class has none, or the class
            cannot update a matrix and a vector with these arguments, or keeps state that checkpoints cannot
            hold.
    """

    optimizer: type[torch.optim.Optimizer]
    lr: float
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    groups: tuple[WeightGroup, ...] = ()
    options: Config = field(default_factory=dict, hash=False)
    """Further arguments of the class."""

    def __post_init__(self) -> None:
        check_at_least_zero("optimizer", self, "lr", "weight_decay", "max_grad_norm")
        check_groups(self.groups, self.lr)
        for key, end, words in (("betas", 1.0, " and below 1"), ("eps", inf, ""), ("warmup_steps", inf, "")):
            given = self.options.get(key)
            every = given if isinstance(given, Sequence) else [given]
            if not all(0 <= number < end for number in every if isinstance(number, int | float)):
                raise ConfigError(f"optimizer.{key}: must be at least 0{words}, got {given}.")
        least = self.options.get("min_8bit_size")
        if isinstance(least, int) and least > prod(SHAPE):
            raise ConfigError(
                f"optimizer.min_8bit_size: is {least}, but the state of {self.name} is found by updating a "
                f"matrix of {prod(SHAPE)} elements, which must have 8-bit state; use at most {prod(SHAPE)}."
            )
        decays = self.weight_decay or any(group.weight_decay for group in self.groups)
        if decays and "weight_decay" not in arguments(self.optimizer):
            raise ConfigError(
                f"optimizer.weight_decay: {self.name} does not have it; set it to 0, in optimizer.groups too."
            )
        whole = self.state.whole
        if whole and self.has_eval_weights:
            raise ConfigError(
                f"optimizer._target_: {self.name} has other weights for evaluations, and keeps "
                f"{', '.join(whole)} of each weight; checkpoints cannot hold both. Choose another class."
            )
        if any(group.lr is not None for group in self.groups):
            self._check_rates()

    @property
    def name(self) -> str:
        return f"{self.optimizer.__module__}.{self.optimizer.__qualname__}"

    @property
    def kind(self) -> str:
        return f"torch optimizer._target_={self.name}"

    @property
    def has_eval_weights(self) -> bool:
        """Whether evaluations with this class use other weights than training."""
        return hasattr(self.optimizer, "eval")

    @property
    def moments(self) -> tuple[str, ...]:
        return self.state.moments

    def build(self, groups: Iterable[ParamGroup]) -> torch.optim.Optimizer:
        """Return the optimizer in its training mode, over groups of ``(name, parameter)`` pairs."""
        left_out = set() if "weight_decay" in arguments(self.optimizer) else {"weight_decay"}
        given = [
            {key: value for key, value in group.items() if key not in left_out}
            | {"params": [parameter for _, parameter in group["params"]]}
            for group in groups
        ]
        optimizer = self.optimizer(given, lr=self.lr, **self.options)  # type: ignore[call-arg]
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    @cached_property
    def state(self) -> StateKinds:
        """Names of the state that the optimizer keeps, by kind, as found in three trial updates.

        Raises:
            ConfigError: if a checkpoint cannot hold a part of this state.
        """
        before, optimizer = (self._trial([SHAPE], steps) for steps in (0, 3))
        kept = [(p, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
        names = sorted({name for _, state in kept for name in state if state[name] is not None})
        kinds = {name: {kind_of_state(p.shape, state.get(name)) for p, state in kept} for name in names}
        numeric = [name for name in names if kinds[name] == {"scalar"}]
        scalars = tuple(name for name in numeric if len({float(state[name]) for _, state in kept}) == 1)
        options, given = before.param_groups[0], arguments(self.optimizer)
        saved = {k: v for k, v in numbers(optimizer)[0].items() if k not in given or v != options.get(k)}
        self._check_saved(optimizer, saved)
        return StateKinds(
            moments=tuple(name for name in names if kinds[name] == {"moment"}),
            scalars=scalars,
            group_scalars={name: type(value) for name, value in saved.items()},
            group_constants=tuple(name for name, value in saved.items() if value == options.get(name)),
            whole=tuple(name for name in names if kinds[name] != {"moment"} and name not in scalars),
        )

    @property
    def updates_together(self) -> bool:
        """Whether the class updates all weights of a GPU at once, with a temporary tensor for each."""
        fused, foreach = (self.options.get(option) for option in ("fused", "foreach"))
        can = "foreach" in arguments(self.optimizer) and self.scope == "element"
        return can and not fused and foreach is not False

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the state per element of a large matrix, without tensors of its rows or columns."""
        optimizer = self._trial([SHAPE])
        (matrix,) = optimizer.param_groups[0]["params"]
        tensors = (value for value in optimizer.state[matrix].values() if isinstance(value, Tensor))
        return sum(value.nbytes for value in tensors if value.numel() >= matrix.numel()) / matrix.numel()

    def _check_saved(self, optimizer: torch.optim.Optimizer, saved: Config) -> None:
        """Raise ConfigError if a checkpoint cannot hold the state of ``optimizer``, or its rate is a tensor.

        ``saved`` are the numbers of its first group that a checkpoint holds, once for all groups.
        """
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise ConfigError(
                f"optimizer._target_: {self.name} keeps lr as a tensor, but the scheduler sets a number; "
                "choose another class."
            )
        states = [state for parameter, state in optimizer.state.items() if isinstance(parameter, Tensor)]
        kept = [item for state in states for item in state.items()]
        lost = {name for name, value in kept if not isinstance(value, Tensor | float | int | None)}
        for group in optimizer.param_groups:
            lost |= {name for name, value in group.items() if isinstance(value, Tensor)}
            lost |= {name for name, value in saved.items() if group.get(name, value) != value}
        if lost:
            raise ConfigError(
                f"optimizer._target_: {self.name} keeps {', '.join(sorted(lost))}, which checkpoints cannot "
                "hold: state must be tensors and numbers of each weight, and numbers that are equal for all "
                "groups of weights. Choose another class."
            )

    def _check_rates(self) -> None:
        """Raise ConfigError if a number that a checkpoint holds once depends on the rate of a group."""
        optimizer = self._trial([SHAPE], lr_of_vector=2.0)
        first, second = (
            {name: float(group[name]) for name in self.state.group_scalars if name in group}
            | {name: float(optimizer.state[group["params"][0]][name]) for name in self.state.scalars}
            for group in optimizer.param_groups
        )
        if names := [name for name, value in first.items() if second.get(name, value) != value]:
            raise ConfigError(
                f"optimizer.groups: {self.name} computes {', '.join(names)} from the learning rate, once for "
                "all weights; leave lr out of optimizer.groups, or choose another class."
            )

    def check_divisible(self) -> None:
        """Raise ConfigError if an update needs all weights at once: several ranks cannot divide it."""
        if self.scope == "model":
            raise ConfigError(
                f"optimizer._target_: {self.name} updates a weight by what it knows of others, which are on "
                "other ranks; use parallelism=single, or another optimizer."
            )

    @cached_property
    def scope(self) -> Scope:
        """Largest part of the model that an update needs at once, found in trial updates."""
        rows, columns = SHAPE
        trial = partial(self._trial, lr=max(self.lr, TRIAL_LR))
        whole, by_row, by_column = (
            trial(shapes) for shapes in ([SHAPE], [(rows // 2, columns)] * 2, [(rows, columns // 2)] * 2)
        )
        alone = [trial([(rows // 2, columns)] * 2, only=number) for number in (0, 1)]
        halves = [half for optimizer in alone for half in matrices(optimizer)]
        # A step size from all weights may differ too little to change three updates.
        coupled = any(numbers(optimizer) != numbers(whole) for optimizer in alone)
        if coupled or not all(map(equal, halves, matrices(by_row))):
            return "model"
        joined = torch.cat(matrices(by_row)), torch.cat(matrices(by_column), dim=1)
        if not self.state.whole and all(map(equal, joined, matrices(whole) * 2)):
            return "element"
        # Weights for evaluation are exchanged between steps, when no rank has a weight whole.
        return "model" if self.has_eval_weights else "matrix"

    def _trial(
        self,
        shapes: Sequence[tuple[int, int]],
        steps: int = 3,
        only: int | None = None,
        lr_of_vector: float = 1.0,
        lr: float | None = None,
    ) -> torch.optim.Optimizer:
        """Return the optimizer after updates of a vector and of a matrix, which is cut into ``shapes``.

        Args:
            shapes: shapes of the parts of the matrix, in order along one dimension.
            steps: number of updates.
            only: index of the one part that is trained. None means that all are.
            lr_of_vector: ratio of the vector's learning rate to that of the matrix.
            lr: learning rate of the matrix. None means that of the optimizer.

        Raises:
            ConfigError: if the class cannot be built with its arguments, or cannot update the parameters, or
                makes them infinite or NaN.
        """
        lr = self.lr if lr is None else lr
        draw = torch.Generator().manual_seed(0)
        scale = torch.linspace(0.1, 3.0, SHAPE[0])[:, None]  # parts of unequal norms
        values = [torch.randn(SHAPE, generator=draw) * scale for _ in range(steps + 1)]
        cut = [pieces(value, shapes) if only is None else [pieces(value, shapes)[only]] for value in values]
        trained = [nn.Parameter(piece.clone()) for piece in cut[0]]
        vector = nn.Parameter(torch.ones(SHAPE[1]))
        groups = (
            {"params": [("", p) for p in trained], "weight_decay": self.weight_decay, "lr": lr},
            {"params": [("", vector)], "weight_decay": 0.0, "lr": lr * lr_of_vector},
        )
        try:
            optimizer = self.build(groups)
            for gradients in cut[1:]:
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient.clone()
                vector.grad = torch.ones_like(vector)
                optimizer.step()
        except Exception as error:  # of any kind: the class is not ours
            raise ConfigError(
                f"optimizer._target_: {self.name} cannot update a matrix and a vector with these options: "
                f"{type(error).__name__}: {error}. Change its options, or choose another class."
            ) from error
        if not all(value.isfinite().all() for value in (*trained, vector)):
            raise ConfigError(
                f"optimizer._target_: {self.name} makes weights infinite or NaN with these options; change "
                "its options, or choose another class."
            )
        return optimizer


def describe_class(target: type[torch.optim.Optimizer]) -> Callable[..., TorchClass]:
    """Return a function that makes a ``TorchClass`` of ``target`` from the arguments of this optimizer class.

    The function has the signature of the class, without ``params``, and with the keys that all optimizers
    have.

    Raises:
        ConfigError: if the class has no learning rate, or has an argument called ``max_grad_norm`` or
            ``groups``, which are keys of all optimizers here.
    """
    parameters = arguments(target)
    if "lr" not in parameters:
        raise ConfigError(
            f"optimizer._target_: {target.__qualname__} has no argument lr, which the scheduler sets; "
            "choose another class."
        )
    if own := {"max_grad_norm", "groups"} & {*parameters}:
        raise ConfigError(
            f"optimizer._target_: {target.__qualname__} has an argument {min(own)} of its own, which "
            f"optimizer.{min(own)} does not set; use a subclass without it."
        )

    def describe(**options: Any) -> TorchClass:
        shared = {key: options.pop(key) for key in SHARED if key in options}
        return TorchClass(target, **{"lr": parameters["lr"].default} | shared, options=options)

    ours = inspect.signature(TorchClass).parameters
    added = {key: ours[key] for key in SHARED if key != "lr"}
    named = {**parameters, **added}
    keywords = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in named.values()]
    keywords.sort(key=lambda parameter: parameter.kind)
    describe.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    describe.__annotations__ = typing.get_type_hints(TorchClass) | {"return": TorchClass}
    describe.__module__ = target.__module__
    return describe


def arguments(kind: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of an optimizer class by name, without the first, the trained parameters."""
    return dict(list(inspect.signature(kind).parameters.items())[1:])


def pieces(value: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cut a matrix into parts of ``shapes``, along the dimension in which they are smaller."""
    dim = 0 if shapes[0][0] < value.shape[0] else 1
    return list(value.split([shape[dim] for shape in shapes], dim))


def matrices(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Return the numbers of each parameter group by name."""
    return [{k: v for k, v in sorted(group.items()) if is_number(v)} for group in optimizer.param_groups]


def equal(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def kind_of_state(shape: torch.Size, value: object) -> StateKind:
    """Return the kind of a value in the state of a parameter of ``shape``."""
    if isinstance(value, Tensor):
        if value.shape == shape and value.is_floating_point():
            return "moment"
        return "scalar" if value.numel() == 1 else "other"
    return "scalar" if is_number(value) else "other"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
