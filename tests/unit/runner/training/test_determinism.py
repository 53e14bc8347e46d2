"""``run.deterministic`` takes effect only during its run."""

import os

import pytest
import torch

from runner.training.determinism import ENVIRONMENT, deterministic
from tests.e2e.losses import undetermined


def switches() -> tuple[object, ...]:
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    environ = [os.environ.get(name) for name in ENVIRONMENT]
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return algorithms, warn_only, torch.backends.cudnn.benchmark, filled, *environ


def test_an_operation_that_cannot_says_so_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before, values = switches(), torch.randn(1, 8)
    undetermined(values)
    with deterministic(True):
        assert switches() == (True, False, False, False, *ENVIRONMENT.values())
        with pytest.raises(RuntimeError, match="deterministic implementation"):
            undetermined(values)
    assert switches() == before
    with deterministic(False):
        undetermined(values)
        assert switches() == before


def test_an_environment_of_the_users_own_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
