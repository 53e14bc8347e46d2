"""What a program under test writes while it trains: one JSON object a line, in the file of BENCH_OUT.

Every peer's own Python imports this file, so it needs the standard library alone. The keys of a step:
``t`` wall and ``cpu`` processor seconds since the process started (all its threads), ``tok`` useful tokens
(no padding; of a shared prompt, both copies) and ``lab`` labels of this step, ``rss`` the process's peak
resident memory in MiB, ``loss``.
"""

import json
import os
import resource
import time


class Events:
    """``step`` is called after every optimizer step."""

    def __init__(self) -> None:
        self._file = open(os.environ["BENCH_OUT"], "a")  # noqa: SIM115  as long as the process

    def step(self, *, tokens: int, labels: int, loss: float, **more: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times = {"t": seconds_since_start(), "cpu": time.process_time()}
        event = {"ev": "step", **times, "tok": tokens, "lab": labels, "loss": loss, "rss": peak, **more}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def seconds_since_start() -> float:
    """Wall time of this process, from Linux's own record of its start."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started
