"""Background saves write the same bytes as foreground saves, one at a time; failures reach all ranks."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from components.checkpoint.async_save import DONE, FAILED, RUNNING, HostCopy
from components.checkpoint.dcp import save_tensors
from components.checkpoint.folder import is_complete, step_folder
from components.checkpoint.manager import CheckpointManager
from components.contracts.errors import TrainingError
from components.engines.shared.process_group import init_process_group
from tests.patience import patience
from tests.ranks import Ranks
from tests.unit.components.checkpoint.test_manager import (
    FakeEngine,
    folders,
    policy,
    save,
    saved_value,
    steps,
)

PATIENCE_S = patience(8)


class Gate:
    """A ``save_tensors`` that blocks until ``open`` is set, and then raises an error if ``fails``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open, self.fails = threading.Event(), threading.Event(), False
        monkeypatch.setattr("components.checkpoint.manager.save_tensors", self.write)

    def write(self, path: Path, *args: Any) -> Any:
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_tensors(path, *args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def poll(p: CheckpointManager, engine: FakeEngine) -> None:
    p.poll(engine)  # type: ignore[arg-type]


def test_training_goes_on_and_what_is_written_is_as_it_was(tmp_path: Path, gate: Gate) -> None:
    p, engine = policy(tmp_path, in_background=True), FakeEngine(1.0)
    save(p, 5, engine=engine)
    assert gate.begun.wait(PATIENCE_S)
    engine.weight.fill_(2.0)  # the next step begins before anything is on disk
    poll(p, engine)
    assert p.background.status == RUNNING
    assert not is_complete(step_folder(tmp_path / "checkpoints", 5))
    gate.open.set()
    p.wait()
    assert saved_value(tmp_path, 5) == 1.0


def test_its_files_are_those_of_a_save_without_a_thread(tmp_path: Path) -> None:
    contents = []
    for in_background in (False, True):
        run = tmp_path / str(in_background)
        with policy(run, in_background=in_background) as p:
            save(p, 5)
        contents.append((step_folder(run / "checkpoints", 5) / "__0_0.distcp").read_bytes())
    assert contents[0] == contents[1]


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    p, engine = policy(tmp_path, in_background=True), FakeEngine(1.0)
    save(p, 5, engine=engine)
    assert gate.begun.wait(PATIENCE_S)
    engine.weight.fill_(2.0)
    second = threading.Thread(target=save, args=(p, 6), kwargs={"engine": engine})
    second.start()
    gate.open.set()
    second.join(PATIENCE_S)
    assert steps(tmp_path)[0] == 5
    p.wait()
    assert [saved_value(tmp_path, step) for step in (5, 6)] == [1.0, 2.0]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_failure_is_reported_at_the_next_step(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    p, engine = policy(tmp_path, in_background=True, on_error=on_error), FakeEngine()
    gate.fails = True
    save(p, 5)
    assert p.background.thread is not None
    gate.open.set()
    p.background.thread.join(PATIENCE_S)
    assert p.background.status == FAILED
    if on_error == "stop":
        with pytest.raises(TrainingError, match="No space left on device"):
            poll(p, engine)
    else:
        poll(p, engine)
        poll(p, engine)
        assert caplog.text.count("No space left on device") == 1
    assert folders(tmp_path) == []
    gate.fails = False
    save(p, 5)
    p.wait()
    assert steps(tmp_path) == [5], "it is no reason not to try again"


def test_a_peer_that_failed_is_heard_of(tmp_path: Path, gate: Gate) -> None:
    """If a save failed on another rank, this rank waits for its own save and raises at the same step."""
    p, engine = policy(tmp_path, in_background=True), FakeEngine()
    save(p, 5)
    gate.fails = True

    def elsewhere(_: float) -> float:
        gate.open.set()
        return FAILED

    engine.max_over_ranks = elsewhere  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="No space"):
        poll(p, engine)


def test_nothing_is_in_flight_once_every_rank_is_done(tmp_path: Path) -> None:
    p, engine = policy(tmp_path, in_background=True), FakeEngine()
    save(p, 5)
    assert p.background.thread is not None
    p.background.thread.join(PATIENCE_S)
    assert p.background.status == DONE
    poll(p, engine)
    assert not p.background.busy


def test_a_run_that_fails_for_a_reason_keeps_what_is_in_flight(tmp_path: Path, gate: Gate) -> None:
    """Hooks do not learn of it: they exchange data, and the other ranks may be in the failed step."""

    def run() -> None:
        with policy(tmp_path, in_background=True, on_saved=pytest.fail) as p:
            save(p, 5)
            gate.open.set()
            raise TrainingError("too many skipped steps")

    with pytest.raises(TrainingError, match="too many skipped"):
        run()
    assert steps(tmp_path) == [5]


def test_a_run_that_fails_says_why_although_its_last_save_fails_too(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        with policy(tmp_path, in_background=True) as p:
            save(p, 5)
            gate.fails = True
            gate.open.set()
            raise TrainingError("too many skipped steps")

    with pytest.raises(TrainingError, match="too many skipped"):
        run()
    assert "No space left on device" in caplog.text


def test_host_memory_serves_every_save() -> None:
    copy, tensor = HostCopy(), torch.ones(3)
    first = copy.of({"a": tensor})["a"]
    second = copy.of({"a": tensor + 1})["a"]
    assert first.data_ptr() == second.data_ptr() != tensor.data_ptr()
    assert second.tolist() == [2.0, 2.0, 2.0]


def on_two_ranks(folder: Path) -> list[str]:
    """Save shards while the default group runs other collectives, and return the errors of failing saves."""
    init_process_group("cpu")
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    engine = FakeEngine()
    engine.weight = distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)])
    for name in ("plain", "background"):
        p = policy(folder / name, in_background=name == "background", first_of_node=rank == 0)
        save(p, 5, engine=engine)
        for _ in range(20):
            torch.distributed.all_reduce(torch.ones(1))
        if name == "background":
            assert isinstance(engine.weight, DTensor)
            assert (
                not HostCopy().of({"weight": engine.weight.detach().requires_grad_()})["weight"].requires_grad
            )
            engine.weight.to_local().zero_()
        p.wait()
    if rank == 1:  # saves fail on one rank
        (taken := folder / "refused" / "checkpoints").mkdir(parents=True)
        taken.rmdir()
        taken.touch()
    torch.distributed.barrier()
    failures = []
    for in_background in (False, True):
        p = policy(folder / "refused", in_background=in_background, first_of_node=rank == 0)
        try:
            save(p, 6, engine=engine)
            p.wait()
        except TrainingError as error:
            failures.append(str(error))
    return failures


def test_ranks_write_in_the_background_and_fail_together(tmp_path: Path) -> None:
    ranks = Ranks(2)
    for failures in ranks.run(on_two_ranks, tmp_path):
        assert len(failures) == 2
        assert all("Not a directory" in failure or "File exists" in failure for failure in failures)
    plain, background = (step_folder(tmp_path / name / "checkpoints", 5) for name in ("plain", "background"))
    assert is_complete(plain)
    assert is_complete(background)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (plain / name).read_bytes() == (background / name).read_bytes()
