"""Variables that CUDA, OpenMP and torch read when they start are set early, unless the user has set them."""

import os
from typing import Any

import pytest

from runner import cli
from runner.launch.default_env import DEFAULTS, OTHER_NAMES, set_default_env
from runner.sweeps.slurm import job

GPU_DEFAULTS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, DEFAULTS),
        (
            {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "GOMP_SPINCOUNT": "3000"},
        ),
        ({"PYTORCH_ALLOC_CONF": "x"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GOMP_SPINCOUNT": "3000"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GOMP_SPINCOUNT": "3000"}),
        ({"GOMP_SPINCOUNT": "0"}, GPU_DEFAULTS),
        ({"OMP_WAIT_POLICY": "passive"}, GPU_DEFAULTS),
    ],
)
def test_what_the_user_has_set_is_kept(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], changed: dict[str, str]
) -> None:
    for name in (*DEFAULTS, *OTHER_NAMES.values()):
        # Set first, so that the value of before is restored even if there is none.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_default_env()
    names = (*DEFAULTS, *OTHER_NAMES.values())
    assert {name: os.environ[name] for name in names if name in os.environ} == given | changed


class BeginError(Exception):
    """Raised in place of setting the variables."""


def begin() -> None:
    raise BeginError


def test_a_command_and_a_job_begin_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "set_default_env", begin)
    with pytest.raises(BeginError):
        cli.main()
    monkeypatch.setattr(job, "set_default_env", begin)
    monkeypatch.setattr(job, "program_first", lambda: None)
    anything: Any = None
    with pytest.raises(BeginError):
        job.SlurmJob({}, anything, (), {})()
