"""How whole weights are given to ranks, and how their owner creates their state."""

from typing import Any, ClassVar

import torch

from components.engines.shared.whole_weights import OwnedWeight, WholeWeightOptimizer, owners
from components.optimizers import TorchClass
from tests.distributed.optimizer_class_cases import Adapted


def test_the_largest_weights_are_given_first() -> None:
    small = [(4, 10)] * 8
    assert owners([*small[:4], (4, 100), *small[4:], (4, 90)]) == [2, 3, 2, 3, 0, 2, 3, 2, 3, 1]


def test_weights_are_balanced_among_the_ranks_that_share_them() -> None:
    assert owners([(2, 5), (1, 50), (2, 5), (4, 1), (4, 1)]) == [0, 0, 1, 0, 1]


class OnOneRank(OwnedWeight):
    def gather(self) -> None: ...

    def distribute(self) -> None: ...


class Counting(torch.optim.Adam):
    """Counts its updates in its groups, and records how many whole weights each of them needs.

    It divides the gradients of a group by their common norm, so each group must have a gradient.
    """

    needed: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            torch._foreach_div_(gradients, norm.clamp(min=1.0))
        self.needed.append(sum(p.numel() > 0 for group in self.param_groups for p in group["params"]))
        return super().step(closure)


def of_one_rank(description: TorchClass, shapes: dict[str, tuple[int, ...]]) -> WholeWeightOptimizer:
    weights = [
        OnOneRank(name, torch.Size(shape), torch.device("cpu"), place=0, sharers=1)
        for name, shape in shapes.items()
    ]
    return WholeWeightOptimizer(description, weights)


def test_state_is_created_weight_by_weight() -> None:
    shapes = {"a.weight": (4, 3), "b.weight": (3, 4), "a.bias": (4,), "norm.weight": (3,)}
    optimizer = of_one_rank(TorchClass(Counting, 1e-2, weight_decay=0.1), shapes)
    assert optimizer.optimizer is not None
    Counting.needed.clear()
    found = optimizer.tensors()
    assert Counting.needed == [1] * len(shapes)
    assert {key: tuple(found[f"exp_avg/{key}"].shape) for key in shapes} == shapes
    assert all("k" not in group for group in optimizer.optimizer.param_groups)
    assert [len(group["params"]) for group in optimizer.optimizer.param_groups] == [2, 2]


def test_only_constants_of_groups_may_be_missing_in_a_checkpoint() -> None:
    optimizer = of_one_rank(TorchClass(Adapted, 1e-2), {"a.weight": (4, 3)})
    with optimizer.loading({}) as tensors:
        assert {key for key in tensors if "group" in key} == {"optimizer_group/k", "optimizer_group/total"}
    assert optimizer.optimizer is not None
    assert optimizer.optimizer.param_groups[0]["d"] == 1.0


def test_numbers_that_a_checkpoint_has_once_are_those_of_all_weights() -> None:
    """Earlier versions took updates for elementwise that depend on all weights."""
    optimizer = of_one_rank(TorchClass(Counting, 1e-2), {"a.weight": (4, 3), "a.bias": (4,)})
    assert {"optimizer_state/step/a.weight", "optimizer_state/step/a.bias"} <= optimizer.tensors().keys()
    with optimizer.loading({"optimizer_state/step": torch.Size([1])}) as tensors:
        assert not any(key.startswith("optimizer_state/step/") for key in tensors)
        tensors["optimizer_step"].fill_(3)
        tensors["optimizer_state/step"].fill_(3)
    assert optimizer.optimizer is not None
    assert [state["step"].item() for state in optimizer.optimizer.state.values()] == [3, 3]


def test_state_of_a_weight_that_was_zero_at_first_is_loaded() -> None:
    """This state is smaller than that of other weights, as with Prodigy and the factors B of LoRA."""
    optimizer = of_one_rank(TorchClass(Adapted, 1e-2), {"lora_B": (4, 3)})
    key = "optimizer_state/rows/lora_B"
    assert optimizer.tensors()[key].shape == (1, 3)
    with optimizer.loading({key: torch.Size([])}) as tensors:
        assert tensors[key].shape == ()
        tensors["optimizer_step"].fill_(1)
    assert optimizer.tensors()[key].data_ptr() == tensors[key].data_ptr()
