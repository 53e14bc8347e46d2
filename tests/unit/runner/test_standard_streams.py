"""A failing output is reported once, and the code that writes to it continues."""

import logging
import os
import sys
from pathlib import Path

import pytest

from runner import cli
from runner.logging_setup import log_to
from runner.standard_streams import lossy_text, print_error


def test_one_report_and_no_error() -> None:
    errors: list[OSError] = []
    stream = lossy_text("/dev/full", "w", errors.append)
    for _ in range(3):
        print("a line", file=stream)
    stream.close()
    assert [error.strerror for error in errors] == ["No space left on device"]


def test_what_can_be_written_is_written_at_once(tmp_path: Path) -> None:
    for text in ("one\n", "two\n"):
        stream = lossy_text(str(tmp_path / "log"), "a", print)
        stream.write(text)
        assert (tmp_path / "log").read_text().endswith(text)
        stream.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_errors_have_a_colour_on_a_terminal(
    terminal: bool,
    environ: dict[str, str],
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    print_error(ValueError("too small"))
    said = capsys.readouterr().err
    assert said.replace("\x1b[1;31m", "").replace("\x1b[0m", "") == "error: too small\n"
    assert said.startswith("\x1b[1;31merror:\x1b[0m ") == coloured


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.symlink_to("/dev/full")
    with log_to(path, None):
        for number in range(3):
            logging.getLogger("runner").info("step %d", number)
    message = f"{path}: cannot be written: No space left on device; the run continues without it\n"
    assert capsys.readouterr().err == message


def test_descriptors_stay_open() -> None:
    reader, writer = os.pipe()
    lossy_text(writer, "w", print).close()
    os.write(writer, b"still open")
    assert os.read(reader, 10) == b"still open"
    os.close(reader)
    os.close(writer)


def test_a_command_whose_reader_has_read_enough_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["import_config"])
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.run_or_answer(lambda _: print("command"), None) == 0
