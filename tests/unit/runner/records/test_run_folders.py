"""Run folders: their order, even if the clock is set back, and their lock."""

import errno
import fcntl
import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.checkpoint import run_order
from components.contracts.errors import ConfigError, TrainingError
from runner.launch.run_lock import locked
from runner.records import run_dir
from runner.records.failures import naming_file
from runner.records.run_dir import create_run_folder

CLOCK = ["2026-05-01 10:00:00", "2026-05-01 10:00:00", "2026-04-01 10:00:00", "2026-05-01 10:00:01"]


def test_the_newest_folder_is_the_last_even_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(CLOCK)

    clock = SimpleNamespace(now=lambda: datetime.fromisoformat(next(times)))
    monkeypatch.setattr(run_dir, "datetime", clock)
    (tmp_path / "name" / "my_copy").mkdir(parents=True)
    made = [create_run_folder(str(tmp_path), "name") for _ in CLOCK]
    ends = ["00-00", "00-00__1", "00-00__2", "00-01"]
    assert [folder.name for folder in made] == [f"2026-05-01_10-{end}" for end in ends]
    assert sorted(made, key=run_order) == made


def test_changes_of_an_earlier_start_do_not_stay_beside_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "git_commit", lambda: "abc")
    for diff in ("+ a line", ""):
        monkeypatch.setattr(run_dir, "git", lambda *_, diff=diff: diff)
        run_dir.write_code_diff(tmp_path)
        assert (tmp_path / "code.diff").exists() == bool(diff)


def test_one_process_holds_a_folder_until_it_ends(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on"), locked(tmp_path):
            pytest.fail("locked twice")
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    if not (child := os.fork()):  # the child ends without releasing the lock
        locked(tmp_path).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_a_filesystem_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        assert "has no locks" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_one_line(tmp_path: Path, number: int) -> None:
    message = f"{tmp_path}: could not be written: {os.strerror(number)}; "
    with pytest.raises(TrainingError, match=message), naming_file(tmp_path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(ConnectionError), naming_file(tmp_path):
        raise ConnectionError("a server")
