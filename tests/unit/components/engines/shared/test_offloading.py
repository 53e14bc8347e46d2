"""Which tensors are offloaded, and when they come back, in a small stack of blocks."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from components.engines.shared.activation_offloading import ActivationOffloading, Group
from tests.distributed.offloading_cases import copying

SIZE, ROWS, BLOCKS = 32, 16, 4


class Block(nn.Module):
    """Three matrices with the same input, a product of two views of one tensor, and a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, 2 * SIZE), nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.rand(SIZE))

    def forward(self, hidden: Tensor) -> Tensor:
        left, right = self.one(hidden).chunk(2, -1)
        return hidden + F.gelu(left) * right * self.scale + self.two(hidden) * left.mean().tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Watched(ActivationOffloading):
    """Offloading that keeps its groups, in the order of the blocks."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.groups: list[Group] = []
        self.largest = 0
        """Largest number of groups that were on the device at the same time."""

    def _begin(self, group: Group | None) -> None:
        super()._begin(group)
        self.groups += [group] if group is not None else []
        self.look()

    def _fetch(self, group: Group) -> None:
        super()._fetch(group)
        self.look()

    def look(self) -> None:
        self.largest = max(self.largest, len(self.resident()))

    def resident(self) -> list[int]:
        return [n for n, g in enumerate(self.groups) if any(s.device is not None for s in g.alive())]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def offloading(model: Model) -> Iterator[Watched]:
    made = Watched()
    made.apply(model, model.blocks)
    with copying():
        yield made


def gradients(model: Model, batches: int = 1) -> list[Tensor]:
    model.zero_grad()
    for seed in range(batches):
        model(inputs(seed)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def inputs(seed: int) -> Tensor:
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed))


def test_gradients_are_those_of_torch_and_two_blocks_are_on_the_device(offloading: Watched) -> None:
    torch.manual_seed(0)
    plain, expected = Model(), []
    with save_on_cpu():
        expected = gradients(plain, batches=2)
    torch.manual_seed(0)
    model = Model()
    offloading.apply(model, model.blocks)
    found = gradients(model, batches=2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert offloading.largest == 2
    assert offloading.resident() == []
    assert all(group.alive() == [] for group in offloading.groups)


def test_storages_are_moved_once_and_parameters_and_small_tensors_are_not(
    model: Model, offloading: Watched
) -> None:
    out = model(inputs(0))
    assert offloading.resident() == [BLOCKS - 1]
    sizes = [sorted(saved.host.nbytes for saved in group.alive()) for group in offloading.groups]
    # The input, both halves together, the activation, its product, and the result of the last matrix.
    rows = ROWS * SIZE * 4
    assert sizes == [[rows, rows, rows, rows, 2 * rows]] * BLOCKS
    out.sum().backward()


def test_a_pass_without_gradient_saves_nothing(model: Model, offloading: Watched) -> None:
    with torch.no_grad():
        model(inputs(0))
    assert offloading.groups == []


def test_a_block_that_is_recomputed_begins_no_group(model: Model, offloading: Watched) -> None:
    out = model(inputs(0))
    model.blocks[0](inputs(0))  # as the backward pass of a checkpoint does
    assert len(offloading.groups) == BLOCKS
    assert offloading.resident() == [BLOCKS - 1]
    out.sum().backward()


def test_micro_batches_in_flight_come_back_in_any_order(model: Model, offloading: Watched) -> None:
    expected = gradients(model, batches=2)
    model.zero_grad()
    first, second = model(inputs(0)).square().sum(), model(inputs(1)).square().sum()
    assert offloading.resident() == [len(offloading.groups) - 1]
    first.backward()
    second.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_interrupted_pass_leaves_nothing(model: Model, offloading: Watched) -> None:
    expected = gradients(model)
    failing = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs(0))
    failing.remove()
    offloading.finish()
    assert not offloading.saving
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


def test_a_graph_without_a_backward_pass_is_freed() -> None:
    """The smallest tensors are saved as they are, and the softmax saves its own result."""

    class Routed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.softmax(-1)

    block = Routed()
    ActivationOffloading(torch.device("cpu")).apply(block, [block])
    freed: list[bool] = []
    hidden = torch.rand(4, requires_grad=True)
    weakref.finalize(hidden, freed.append, True)
    result = block(hidden * 2)
    del result, hidden
    gc.collect()
    assert freed == [True]
