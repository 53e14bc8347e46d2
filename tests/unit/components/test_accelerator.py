"""Accelerators other than CUDA, found, refused and joined with ``torch.accelerator`` replaced."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from components.accelerator import UNSUPPORTED, inference_device
from components.contracts.device import DeviceKind
from components.contracts.errors import ConfigError
from components.engines.fsdp2.state_dict import restore_rng, rng_tensors
from components.engines.shared import process_group
from components.preflight.device_checks import check_ranks, resolve_device
from components.preflight.estimates.device_specs import find_device
from components.rank_info import GPU_SHARERS

ROOT = Path(__file__).resolve().parents[3]


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, *, count: int = 1, free: int = 2**40) -> None:
    """Pretend that torch finds ``count`` accelerators of ``kind``, each with ``free`` bytes."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, free))


@pytest.mark.parametrize(
    ("found", "asked", "expected"),
    [
        (None, "auto", "cpu"),
        ("cuda", "auto", "cuda"),
        ("xpu", "auto", "xpu"),
        ("xpu", "xpu", "xpu"),
        ("xpu", "cpu", "cpu"),
        ("mps", "auto", "cpu"),
    ],
)
def test_auto_is_the_accelerator_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, found: str | None, asked: DeviceKind, expected: str
) -> None:
    pretend(monkeypatch, found)
    assert resolve_device(asked) == expected


@pytest.mark.parametrize(
    ("found", "asked", "words"),
    [
        (None, "cuda", "no CUDA device is visible"),
        ("xpu", "cuda", "no CUDA device is visible"),
        ("cuda", "npu", "no NPU device is visible"),
        ("mps", "mps", re.escape(UNSUPPORTED["mps"])),
    ],
)
def test_absent_and_unsupported_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, found: str | None, asked: DeviceKind, words: str
) -> None:
    pretend(monkeypatch, found)
    with pytest.raises(ConfigError, match=f"run.device: .*{words}"):
        resolve_device(asked)


def test_forecasts_of_a_named_gpu_are_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu")
    assert resolve_device("auto", "H100") == "cuda"
    with pytest.raises(ConfigError, match=r"H100 is a GPU, and run.device=xpu"):
        resolve_device("xpu", "H100")


def test_ranks_need_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu", count=2)
    check_ranks(2, "xpu", 2)
    with pytest.raises(ConfigError, match=r"takes 4 ranks .* on 2 visible"):
        check_ranks(4, "xpu", 4)


@pytest.mark.parametrize(
    ("kind", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_groups_have_the_backend_of_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, backend: str
) -> None:
    made, current = [], []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    device = process_group.init_process_group(kind)
    assert made == [backend]
    assert device.type == kind
    assert current == ([] if kind == "cpu" else [device])


def test_random_streams_of_the_accelerator_are_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = []
    module = SimpleNamespace(get_rng_state=lambda _: torch.tensor([7]), set_rng_state=restored.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    streams = rng_tensors(3, torch.device("xpu", 0))
    assert set(streams) == {"rng/3", "rng_xpu/3"}
    torch.rand(5)
    restore_rng(streams)
    assert restored == [streams["rng_xpu/3"]]
    assert torch.equal(torch.get_rng_state(), streams["rng/3"])


def test_models_that_fit_run_on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8, bias=False)  # 256 bytes
    pretend(monkeypatch, "xpu", free=513)
    assert inference_device(model) == torch.device("xpu")
    pretend(monkeypatch, "xpu", free=512)
    assert inference_device(model) == torch.device("cpu")
    pretend(monkeypatch, None)
    assert inference_device(model) == torch.device("cpu")


def test_preflight_measures_devices_without_a_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(total_memory=48 * 2**30)
    module = SimpleNamespace(get_device_name=lambda _: "Max 1550", get_device_properties=lambda _: facts)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("components.preflight.estimates.device_specs.peak_flops", lambda *_: 3e12)
    found = find_device("xpu", None, None, local_ranks=2, dtype=torch.bfloat16)
    assert (found.name, found.kind, found.flops) == ("Max 1550", "xpu", 3e12)
    assert found.memory == 46.5 * 2**30
    assert find_device("xpu", None, "48GiB", local_ranks=2, dtype=torch.bfloat16).memory == 48 * 2**30
    monkeypatch.setenv(GPU_SHARERS, "2")  # concurrent jobs of a sweep
    assert find_device("xpu", None, None, local_ranks=2, dtype=torch.bfloat16).memory == 22.5 * 2**30


def test_the_runner_and_the_contracts_do_not_call_cuda() -> None:
    """The exceptions divide the GPUs of a machine by ``CUDA_VISIBLE_DEVICES``, and rehearse a CUDA device."""
    paths = [path for part in ("runner", "components/contracts") for path in (ROOT / part).rglob("*.py")]
    calls = {path.relative_to(ROOT).as_posix() for path in paths if "torch.cuda" in path.read_text()}
    assert calls == {"runner/launch/checks.py", "runner/sweeps/local_jobs.py"}
