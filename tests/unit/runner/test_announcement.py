"""The first line that a terminal shows."""

import sys

import pytest

from runner.cli import announce_loading


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_shows_that_torch_is_imported(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    monkeypatch.setitem(sys.modules, "torch", None)
    announce_loading()
    monkeypatch.delitem(sys.modules, "torch")
    announce_loading()
    assert capsys.readouterr().err == "loading torch ...\n" * on_terminal
