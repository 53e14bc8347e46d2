"""The first line that a terminal shows."""

import sys
from pathlib import Path
from unittest import mock

import pytest

from runner.cli import announce_loading
from runner.commands import chat, export, generate
from runner.commands.evaluate import evaluation


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


COMMANDS = {
    "chat": (chat.chat, ["checkpoint=x"]),
    "generate": (generate.write_completions, ["checkpoint=x", "prompts=y"]),
    "export": (export.export, ["checkpoint=x", "output=y"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_so_before_it_reads_its_model(name: str) -> None:
    command, arguments = COMMANDS[name]
    announced = mock.patch(f"runner.commands.{name}.announce_loading", side_effect=InterruptedError)
    with announced, pytest.raises(InterruptedError):
        command(arguments)


def test_an_evaluation_says_so_before_it_reads_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    announced = mock.patch("runner.cli.announce_loading", side_effect=InterruptedError)
    with announced, pytest.raises(InterruptedError):
        evaluation([f"checkpoint={tmp_path}", "data.eval=x.jsonl"])
