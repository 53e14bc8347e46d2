"""A forked command and a real one give the same output, exit code, files and metrics."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT, SMALL, command, curve, newest, run_command, run_forked, write_chats

TWO_RANKS = (*SMALL, "parallelism=fsdp2", "parallelism.dp=2", "run.micro_batch_size=1", "run.max_steps=2")
DATA = ("data=files", "data.train=chats.jsonl", "data.eval_fraction=0.2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "done": (*TWO_RANKS, *DATA, "checkpoint.save_every=1", "run.export=true", "run.final_sample_tokens=4"),
    "failed": (*TWO_RANKS, *DATA, "stage._target_=tests.e2e.losses.Fails", "+stage.at=1"),
    "refused": (*SMALL, *DATA, "run.global_batch_size=5"),
}


def lines(text: str, folder: Path) -> list[str]:
    """Return the lines of a text without times, rates and the folder."""
    clock = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d|[\d.,]+(?= (s|ms|GiB|GFLOP/s|tok/s|tokens/s)\b)"
    text = re.sub(clock, "N", text)
    text = text.replace(str(folder), "FOLDER")
    return [" ".join(line.split()) for line in text.splitlines() if "tokens/s" not in line]


def files(folder: Path) -> list[str]:
    """Return the names of the files of the run in ``folder``."""
    run = newest(folder / "outputs")
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", COMMANDS)
def test_both_ways_are_one(tmp_path: Path, how: str) -> None:
    typed, forked = tmp_path / "typed", tmp_path / "forked"
    answers: list[tuple[Path, subprocess.CompletedProcess[str]]] = []
    for folder in (typed, forked):
        folder.mkdir()
        environ = {"PYTHONPATH": str(ROOT)}
        write_chats(folder / "chats.jsonl")
        if folder is typed:
            answer = run_command(command(*COMMANDS[how]), cwd=folder, environ=environ)
        else:
            answer = run_forked(*COMMANDS[how], cwd=folder, environ=environ)
        answers.append((folder, answer))
    (_, real), (_, fake) = answers
    assert real.returncode == fake.returncode == {"done": 0, "failed": 1, "refused": 2}[how]
    assert lines(fake.stdout, forked) == lines(real.stdout, typed)
    assert lines(fake.stderr, forked) == lines(real.stderr, typed)
    if how != "refused":
        assert files(forked) == files(typed)
        assert curve(newest(forked / "outputs")) == curve(newest(typed / "outputs"))
