"""Events of a compared program: one JSON object per step and line in the file BENCH_OUT.

The Python of each peer imports this file, so it uses only the standard library. The keys of a step are ``t``
and ``cpu`` (wall and processor seconds of all threads since the start of the process), ``tok`` (tokens of
this step without padding; a shared prompt counts twice), ``lab`` (labels of this step), ``rss`` (peak
resident memory of the process in MiB) and ``loss``.
"""

import json
import os
import resource
import time


class Events:
    """A writer of events, whose ``step`` is called after each optimizer step."""

    def __init__(self) -> None:
        self._file = open(os.environ["BENCH_OUT"], "a")  # noqa: SIM115  open as long as the process

    def step(self, *, tokens: int, labels: int, loss: float, **more: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times = {"t": seconds_since_start(), "cpu": time.process_time()}
        event = {"ev": "step", **times, "tok": tokens, "lab": labels, "loss": loss, "rss": peak, **more}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def seconds_since_start() -> float:
    """Return the wall time in seconds since the start of this process, from Linux's /proc."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started
