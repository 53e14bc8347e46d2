"""The record of a rehearsal as JSON."""

from collections import Counter

from components.contracts.json_types import Json
from components.rehearsal.host_waits import Wait
from components.rehearsal.memory_components import bytes_by_component
from components.rehearsal.mode import RehearsalMode


def describe(mode: RehearsalMode) -> Json:
    """Return everything that ``mode`` has recorded; sizes are bytes."""
    memory, traffic, arithmetic = mode.memory, mode.traffic, mode.arithmetic
    lines: Counter[tuple[str, str]] = Counter()
    for held, size in memory.at_peak().items():
        lines[held.moment, held.line] += size
    return {
        "memory": {
            "peak": memory.peak,
            "moment": memory.peak_moment,
            "by_moment": memory.by_moment,
            "components": dict(bytes_by_component(memory)),
            "lines": [
                {"bytes": size, "moment": moment, "line": line}
                for (moment, line), size in lines.most_common()
            ],
        },
        "traffic": [
            vars(exchange) | {"calls": calls, "bytes": traffic.num_bytes[exchange]}
            for exchange, calls in traffic.calls.most_common()
        ],
        "waits": wait_rows(mode.waits.waits),
        "blocking_copies": wait_rows(mode.waits.copies),
        "flops": [
            {"moment": moment, "kind": kind, "flops": flops}
            for (moment, kind), flops in arithmetic.flops.items()
        ],
        "kernels": dict(arithmetic.kernels),
        "violations": list(mode.rules.violations),
        "unknown_values": mode.values.failures,
    }


def wait_rows(found: Counter[Wait]) -> list[Json]:
    return [vars(wait) | {"count": count} for wait, count in found.most_common()]
