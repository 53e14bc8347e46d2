from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.engines.shared import train_step
from components.engines.shared.train_step import TrainStepEngine


@pytest.mark.parametrize(
    "method", ["train_microbatches", "logps", "tensors", "load", "export", "apply_update"]
)
def test_an_engine_without_a_method_cannot_be_built(method: str) -> None:
    """Otherwise the missing method would do nothing, and the run would train nothing without an error."""

    class Incomplete(TrainStepEngine):
        pass

    with pytest.raises(TypeError, match=rf"\b{method}\b"):
        Incomplete()  # type: ignore[abstract]


@pytest.mark.parametrize("shape", [(5, 4), (7,), (0, 4), (2, 16)])
def test_a_reference_is_mixed_in_pieces(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "MIXED_TOGETHER", 8)
    kept, trained = torch.randn(shape).bfloat16(), torch.randn(shape)
    expected = kept.float().lerp(trained, 0.25).bfloat16()
    engine: Any = SimpleNamespace(reference_weights=lambda: [(kept, trained)])
    TrainStepEngine.mix_reference(engine, 0.25)
    assert torch.equal(kept, expected)
