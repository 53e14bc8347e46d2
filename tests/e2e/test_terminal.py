"""What a run shows on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

from tests.e2e.commands import SMALL, command, run_here

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(*words: str, folder: Path) -> list[str]:
    """Return the lines that a command writes to a terminal, and each state of the progress bar."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environ |= {"TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(*words), cwd=folder, env=environ, stdin=its_end, stdout=its_end, stderr=its_end
    )
    os.close(its_end)
    output = b""
    try:
        while part := os.read(terminal, 4096):
            output += part
    except OSError:  # the terminal is closed when the command has ended
        pass
    os.close(terminal)
    assert process.wait() == 0, output.decode()
    return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", output.decode())) if line.strip()]


def test_a_resumed_run_on_a_terminal(tmp_path: Path) -> None:
    options = ("run.name=small", "run.final_sample_tokens=0", "run.export=false")
    first = run_here(tmp_path, *SMALL, *options, "run.max_steps=1")
    again = (*options, "run.max_steps=3", "checkpoint.resume=auto", "checkpoint.allow_mismatch=true")
    lines = shown(*SMALL, *again, f"run.output_dir={tmp_path}", folder=Path.cwd())
    assert lines[0] == "loading torch ..."
    text = "\n".join(line.rstrip() for line in lines)
    for pattern in (
        rf"resumed from step 1 of {first}/checkpoints/",
        r"step 1/3 .* 33% .* left$",
        r"epoch \d\.\d\d  step 3/3 .* 100% .* left$",
        r"step 3  loss .* tok/s  .* GiB$",
    ):
        assert re.search(f"^{pattern}", text, re.MULTILINE), text
    assert [line for line in text.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
