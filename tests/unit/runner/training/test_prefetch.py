import threading

import pytest
import torch
from torch import Tensor

from components.contracts.batch import Batch
from runner.training.prefetch import Prefetched


class Loader:
    """A loader whose batches hold their step; ``made`` records the steps and the threads that made them."""

    num_steps = 4

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def microbatches(self, step: int) -> list[Batch]:
        assert step < self.num_steps
        if step == 2:
            raise OSError("a torn file")
        self.made.append((step, threading.get_ident()))
        number = torch.tensor([[step]])
        return [Batch(number, number, number, torch.tensor([1]))]


def number(batches: list[Batch]) -> int:
    return int(batches[0].input_ids)


def test_the_next_step_is_made_ahead_in_another_thread() -> None:
    loader = Loader()
    ahead = Prefetched(loader, torch.device("cpu"))
    assert number(ahead.microbatches(0)) == 0
    assert number(ahead.microbatches(1)) == 1
    assert [step for step, _ in loader.made] == [0, 1]
    assert threading.get_ident() not in {thread for _, thread in loader.made}


def test_any_step_can_be_asked_for() -> None:
    """Steps may be read in any order, as for a resumed run, and no batch is made beyond the last step."""
    ahead = Prefetched(Loader(), torch.device("cpu"))
    assert [number(ahead.microbatches(step)) for step in (3, 0, 0, 1, 3)] == [3, 0, 0, 1, 3]


def test_an_error_shows_in_its_own_step() -> None:
    ahead = Prefetched(Loader(), torch.device("cpu"))
    assert number(ahead.microbatches(1)) == 1
    with pytest.raises(OSError, match="torn"):
        ahead.microbatches(2)
    assert number(ahead.microbatches(3)) == 3


def test_all_that_is_copied_to_a_gpu_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are recorded here in place of page-locking them, which needs a GPU."""
    pinned: dict[int, Tensor] = {}
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.setdefault(id(tensor), tensor))
    selected: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda on: selected.append((on, threading.get_ident()))
    )
    loader, device = Loader(), torch.device("cuda", 3)
    (batch,) = Prefetched(loader, device).microbatches(1)
    assert selected == [(device, loader.made[0][1])]
    assert batch.label_index is not None
    assert all(id(value) in pinned for value in vars(batch).values() if isinstance(value, Tensor))
