import pytest

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
