"""What a rehearsal records about memory, waits, arithmetic and the arguments of kernels."""

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operator
from torch import Tensor
from torch._subclasses import FakeTensorMode

from components.rehearsal.arithmetic import Arithmetic
from components.rehearsal.host_values import HostValues
from components.rehearsal.host_waits import HostWaits
from components.rehearsal.kernel_rules import KernelRules
from components.rehearsal.live_memory import LiveMemory
from components.rehearsal.memory_components import bytes_by_component
from components.rehearsal.pinned_memory import PinnedMemory

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
WITHOUT_DATA = FakeTensorMode()


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with WITHOUT_DATA:
        return torch.empty(shape, dtype=dtype, device=GPU)


def test_memory_is_that_of_live_storages() -> None:
    memory = LiveMemory()
    first = on_gpu(1024)
    memory.hold(first)
    memory.hold(first.view(2, 512))  # the same storage
    memory.enter("forward")
    second = on_gpu(100)
    memory.hold(second)
    assert (memory.now, memory.peak_moment) == (2048 + 512, "forward")
    del second
    assert memory.now == 2048
    assert memory.by_moment == {"build": 2048, "forward": 2560}
    assert sum(memory.at_peak().values()) == memory.peak == 2560


def test_the_peak_is_remembered_exactly_after_its_storages_have_changed() -> None:
    """Storages that were freed or resized since count with their bytes at the peak, new ones do not count."""
    memory = LiveMemory()
    kept, resized, freed = on_gpu(1024), on_gpu(512), on_gpu(256)
    for tensor in (kept, resized, freed):
        memory.hold(tensor)
    memory.assign([freed], "gradients")
    del freed
    resized.untyped_storage().resize_(0)
    memory.resized(resized.untyped_storage())
    memory.hold(later := on_gpu(256))
    memory.assign([kept, later], "weights")  # after the peak
    assert bytes_by_component(memory) == {"weights": 2048, "buffers": 1024, "gradients": 512}
    assert memory.peak == 2048 + 1024 + 512


HALF = {"dtype": torch.bfloat16}
ZERO, PINNED, HOST = torch.tensor(0.0), torch.empty(4), torch.device("cpu")


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "waits", "copies"),
    [
        (aten.nonzero.default, lambda: (on_gpu(4),), {}, 1, 0),
        (aten._to_copy.default, lambda: (on_gpu(4),), {"device": torch.device("cpu")}, 1, 0),
        (aten._to_copy.default, lambda: (torch.empty(4),), {"device": GPU}, 0, 1),
        (aten._to_copy.default, lambda: (torch.empty(4),), {"device": GPU, "non_blocking": True}, 0, 1),
        (aten._to_copy.default, lambda: (PINNED[1:],), {"device": GPU, "non_blocking": True}, 0, 0),
        (aten._to_copy.default, lambda: (PINNED,), {"device": GPU}, 0, 1),
        # torch copies these to pageable memory first
        (aten._to_copy.default, lambda: (PINNED[::2],), {"device": GPU, "non_blocking": True}, 0, 1),
        (aten.copy_.default, lambda: (on_gpu(2, 4), PINNED, True), {}, 0, 1),
        (aten.copy_.default, lambda: (PINNED[::2], on_gpu(2), True), {}, 1, 0),
        # the GPU changes the dtype
        (aten._to_copy.default, lambda: (PINNED,), HALF | {"device": GPU, "non_blocking": True}, 0, 0),
        (aten.copy_.default, lambda: (on_gpu(4), PINNED, True), {}, 0, 0),
        (aten._to_copy.default, lambda: (on_gpu(4),), {"device": HOST, "non_blocking": True}, 0, 0),
        (aten.copy_.default, lambda: (on_gpu(4), torch.empty(4)), {}, 0, 1),
        (aten.copy_.default, lambda: (torch.empty(4), on_gpu(4), True), {}, 1, 0),
        (aten.copy_.default, lambda: (PINNED, on_gpu(4), True), {}, 0, 0),
        (aten.index.Tensor, lambda: (on_gpu(4), [on_gpu(4, dtype=torch.bool)]), {}, 1, 0),
        (aten.index.Tensor, lambda: (on_gpu(4), [on_gpu(2, dtype=torch.int64)]), {}, 0, 0),
        (aten.index_put_.default, lambda: (on_gpu(4), [on_gpu(4, dtype=torch.bool)], on_gpu(1)), {}, 1, 0),
        # masked_fill, for which the number of places need not be known
        (aten.index_put_.default, lambda: (on_gpu(4), [on_gpu(4, dtype=torch.bool)], ZERO), {}, 0, 0),
        (aten.index_put_.default, lambda: (on_gpu(4), [on_gpu(4, dtype=torch.bool)], ZERO, True), {}, 1, 0),
        (aten.add.Tensor, lambda: (on_gpu(4), on_gpu(4)), {}, 0, 0),
    ],
)
def test_waits_of_the_host(func: Any, args: Any, kwargs: dict[str, Any], waits: int, copies: int) -> None:
    found = HostWaits()
    found.pinned.follow(aten._pin_memory.default, (ZERO,), {}, PINNED)
    found.see(func, args(), kwargs, kwargs.get("device"))
    assert (found.waits.total(), found.copies.total()) == (waits, copies)


def test_memory_that_is_pinned() -> None:
    """It is what is asked for, and the result of a copy from a GPU for which the host does not wait."""
    found, without_waiting = PinnedMemory(), {"device": HOST, "non_blocking": True}
    asked, copied, plain = (torch.empty(4) for _ in range(3))
    found.follow(aten.empty.memory_format, ((4,),), {"pin_memory": True}, asked)
    found.follow(aten._to_copy.default, (on_gpu(4),), without_waiting, copied)
    found.follow(aten._to_copy.default, (ZERO,), without_waiting, plain)
    assert [found.holds(tensor) for tensor in (asked[2:], copied, plain)] == [True, True, False]


def attention_arguments(
    width: int = 64, dtype: torch.dtype = torch.bfloat16, ends: tuple[int, ...] = (0, 6, 10), longest: int = 6
) -> tuple[list[Any], HostValues]:
    """Return ten tokens of two sequences for ``_varlen_attn``, with the values of their boundaries."""
    values, boundaries = HostValues(), on_gpu(len(ends), dtype=torch.int32)
    values.set(boundaries, torch.tensor(ends, dtype=torch.int32))
    q, k, v = (on_gpu(10, heads, width, dtype=dtype) for heads in (4, 2, 2))
    return [q, k, v, boundaries, boundaries, longest, longest], values


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"width": 12}, "head width 12"),
        ({"width": 512}, "head width 512"),
        ({"dtype": torch.float32}, "is torch.float32"),
        ({"ends": (0, 6, 9)}, "ends at 9 of 10"),
        ({"longest": 5}, "a sequence of 6 with a maximum of 5"),
    ],
)
def test_arguments_of_the_attention_kernel(changes: dict[str, Any], words: str | None) -> None:
    args, values = attention_arguments(**changes)
    rules = KernelRules(values)
    rules.check(torch.ops.torch_attn._varlen_attn.default, args)
    assert (words is None) == (not rules.violations)
    assert words is None or any(words in text for text in rules.violations)


@pytest.mark.parametrize(
    ("width", "dtype", "words"),
    [
        (16, torch.bfloat16, None),
        (12, torch.bfloat16, "the left operand has rows of 24 bytes"),
        (16, torch.float32, "the right operand is torch.float32"),
    ],
)
def test_arguments_of_the_grouped_kernel(width: int, dtype: torch.dtype, words: str | None) -> None:
    left, right = on_gpu(6, width, dtype=dtype), on_gpu(2, width, 8, dtype=dtype)
    rules = KernelRules(HostValues())
    rules.check(aten._grouped_mm.default, (left, right))
    assert (words is None) == (not rules.violations)
    assert words is None or any(words in text for text in rules.violations)


def test_arithmetic_of_products_and_causal_attention() -> None:
    found = Arithmetic()
    a, b = on_gpu(3, 5), on_gpu(5, 7)
    found.see(aten.mm.default, (a, b), a @ b, HostValues())
    args, values = attention_arguments()
    found.see(torch.ops.torch_attn._varlen_attn.default, args, None, values)
    found.see(torch.ops.prim.device.default, (a,), a.device, HostValues())  # asks, and launches nothing
    pairs = (6**2 + 4**2) / 2
    assert found.flops == {("build", "matmul"): 2 * 3 * 5 * 7, ("build", "attention"): 4 * 4 * 64 * pairs}
    assert found.kernels == {"build": 2}
    found.see(torch.ops.torch_attn._varlen_attn.default, (*args, True, None, [1, 0]), None, values)
    assert found.flops["build", "attention"] == 4 * 4 * 64 * (pairs + 2 * 10)  # two keys of ten tokens


def test_tokens_of_an_expert_are_chosen_by_weight() -> None:
    """Each of the experts has room for two of the four tokens, which are those that a router sent to it."""
    values = HostValues()

    def follow(func: Any, *args: Any) -> Any:
        with WITHOUT_DATA:
            out = func(*args)
        values.follow(func, args, {}, out)
        return out

    scores = on_gpu(4, 2)
    chosen, room = follow(aten.topk.default, scores, 1)[1], follow(aten.topk.default, scores, 2, 0)[1]
    weights = follow(aten.scatter.src, follow(aten.zeros_like.default, scores), 1, chosen, on_gpu(4, 1))
    kept = follow(aten.topk.default, weights, 2, 0)[1]
    assert values.of(chosen).flatten().tolist() == [0, 1, 0, 1]
    assert values.of(kept).sort(0)[0].tolist() == [[0, 1], [2, 3]]
    assert values.of(room).T.tolist() == [[0, 1], [2, 3]]
    follow(aten.add_.Tensor, weights, scores)
    assert values.known(weights) is None
    many = follow(aten.zeros_like.default, on_gpu(2**14, 128))
    mask = follow(aten.scatter.value, many, 1, follow(aten.topk.default, many, 1)[1], 1)
    assert values.of(mask).sum() == 2**14
    assert values.known(follow(aten._to_copy.default, mask)) is None  # may be moments of an optimizer


def test_values_under_a_result_without_known_values_are_lost() -> None:
    values, target = HostValues(), on_gpu(4, dtype=torch.int64)
    values.set(target, torch.arange(4))
    values.follow(aten.neg.out, (on_gpu(4, dtype=torch.int64),), {"out": target}, target)
    assert values.known(target) is None
