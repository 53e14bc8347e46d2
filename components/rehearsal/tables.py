"""The record of a rehearsal as sections of a report."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from components.contracts.json_types import Config, Json
from components.preflight.engine_layouts import comm_cost
from components.preflight.estimates.step_time import comm_inputs, step_work
from components.preflight.forecast_report import Report
from components.preflight.formatting import as_count, as_size
from components.preflight.search.candidate import Candidate
from components.preflight.search.rank_groups import format_ranks, groups
from components.rehearsal.memory_components import INSIDE

TOP_LINES = 15
"""Maximum number of lines of code that the report lists with the memory that they allocated.
``rehearsal.json`` contains all."""
OF_ACTIVATIONS = frozenset({"converted", "dequantized", "rounded"})
"""Parts of the estimate that are among the activations of a rehearsal."""
LIMITS = (
    "Not rehearsed: values, time, kernels (triton, Transformer Engine, run.compile), memory inside of "
    "kernels, fragmentation, buffers of NCCL and cuBLAS. Routers are balanced, and peers send what this rank "
    "sends."
)


def rehearsal_report(case: Candidate, stage: int, record: Json, steps: int) -> Report:
    """Return the report on the last of ``steps`` steps; ``stage`` is the rank's pipeline stage."""
    memory, estimate = record["memory"], case.memory[stage].total
    waits = [row for row in record["waits"] if row["moment"] != "save"]
    copies = [row for row in record["blocking_copies"] if row["moment"] != "save"]
    inside = sum(row["count"] for row in (*waits, *copies) if row["moment"] in INSIDE)
    fits = memory["peak"] <= case.device.memory
    traffic = traffic_rows(case, record["traffic"])
    sections: dict[str, Config | Sequence[Config]] = {
        "rehearsal": {
            "rank": record["rank"],
            "stage": stage,
            "steps": steps,
            "peak_bytes": memory["peak"],
            "peak_moment": memory["moment"],
            "estimated_bytes": estimate,
            "device_bytes": case.device.memory,
            "fits": fits,
            "kernels": sum(n for moment, n in record["kernels"].items() if moment != "save"),
            "waits_inside_microbatches": inside,
        },
        "peaks": [{"moment": moment, "bytes": size} for moment, size in memory["by_moment"].items()],
        "memory_components": component_rows(memory["components"], case.memory[stage].parts),
        "memory_lines": memory["lines"][:TOP_LINES],
        "traffic": traffic,
        "communication": communication_rows(case, traffic, stage, steps - 1),
        "waits": [*waits, *(row | {"kind": f"{row['kind']}, blocking"} for row in copies)],
        "arithmetic": arithmetic_rows(record["flops"]),
        "violations": [{"violation": text} for text in record["violations"]],
    }
    sections = {name: section for name, section in sections.items() if section}
    return Report(sections, summary_lines(case, sections["rehearsal"], record))  # type: ignore[arg-type]


def summary_lines(case: Candidate, summary: Config, record: Json) -> dict[str, str]:
    peak, estimate = summary["peak_bytes"], summary["estimated_bytes"]
    total = sum(row["bytes"] for row in record["traffic"] if row["moment"] != "save")
    flops = sum(row["flops"] for row in record["flops"])
    return {
        "rehearsal": f"rank {summary['rank']}, pipeline stage {summary['stage']}, {summary['steps']} step(s)",
        "peak": (
            f"{as_size(peak)} in {summary['peak_moment']}, {'fits' if summary['fits'] else 'does not fit'} "
            f"{as_size(case.device.memory)} ({case.device.name}); estimated {as_size(estimate)} "
            f"({estimate / peak - 1:+.1%})"
        ),
        "step": (
            f"{as_count(flops)}FLOP in {summary['kernels']:,} kernels, {as_size(total)} sent and received, "
            f"{summary['waits_inside_microbatches']} wait(s) of the host inside of micro-batches"
        ),
        "limits": LIMITS,
    }


def component_rows(found: Mapping[str, int], parts: Mapping[str, int]) -> list[Config]:
    """Return the bytes of each component at the peak of the rehearsal, and at that of the estimate."""
    estimated: Counter[str] = Counter()
    for name, size in parts.items():
        estimated["activations" if name in OF_ACTIVATIONS else name] += size
    return [
        {"component": name, "bytes": found.get(name, 0), "estimated_bytes": estimated[name]}
        for name in dict.fromkeys([*estimated, *found])
    ]


def traffic_rows(case: Candidate, found: Sequence[Json]) -> list[Config]:
    """Return calls and bytes of a step by dimension of the mesh, ranks, collective, dtype and moment."""
    names = names_of_ranks(case)
    calls: Counter[tuple[str, ...]] = Counter()
    num_bytes: Counter[tuple[str, ...]] = Counter()
    for row in found:
        if row["moment"] == "save":
            continue
        ranks = tuple(row["ranks"])
        if len(ranks) == 1:
            continue
        shown = "all" if len(ranks) == case.world_size else format_ranks(ranks)
        key = (names.get(ranks, shown), shown, row["collective"].strip("_"), row["dtype"], row["moment"])
        calls[key] += row["calls"]
        num_bytes[key] += row["bytes"]
    columns = ("group", "ranks", "collective", "dtype", "moment")
    return [
        dict(zip(columns, key, strict=True)) | {"calls": calls[key], "bytes": size}
        for key, size in num_bytes.most_common()
    ]


def names_of_ranks(case: Candidate) -> dict[tuple[int, ...], str]:
    """Return the label of each group by its ranks.

    Groups with the same ranks have one entry, with their labels joined by commas.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for label, members in groups(case.layout, case.world_size).items():
        for ranks in members:
            found.setdefault(tuple(ranks), []).append(label)
    return {ranks: ", ".join(labels) for ranks, labels in found.items()}


def dimensions(label: str) -> frozenset[str]:
    """Return the dimensions under which the traffic of the groups ``label`` is estimated."""
    return frozenset(name.partition(" x ")[0].removesuffix(" of experts") for name in label.split(", "))


def merged_dimensions(labels: Iterable[str]) -> list[frozenset[str]]:
    """Return sets of mesh dimensions that share a group of ranks, so that their traffic is one number."""
    found: list[frozenset[str]] = []
    for names in map(dimensions, labels):
        touching = [other for other in found if other & names]
        found = [other for other in found if not other & names] + [names.union(*touching)]
    return found


def communication_rows(case: Candidate, traffic: Sequence[Config], stage: int, step: int) -> list[Config]:
    """Return the bytes that a rank sends in ``step``, recorded and estimated, by dimension of the mesh."""
    sizes = {label: len(ranks) for ranks, label in names_of_ranks(case).items()}
    work = step_work(case, step)
    volumes = comm_cost(case.layout, work.size, comm_inputs(case, work, stage)).volumes
    if any(volume.dimension == "all" for volume in volumes):
        sizes["all"] = case.world_size
    sent: Counter[str] = Counter()
    for row in traffic:
        if row["group"] in sizes and row["collective"] != "recv":
            ranks = 1 if row["collective"] == "send" else sizes[row["group"]]
            factor = 2 if row["collective"].startswith(("allreduce", "all_reduce")) else 1
            sent[row["group"]] += round(row["bytes"] * (factor * (ranks - 1) / ranks if ranks > 1 else 1))
    estimated: Counter[str] = Counter()
    for volume in volumes:
        if volume.dimension != "host":  # copies to host memory are not recorded
            estimated[volume.dimension] += round(volume.num_bytes)
    return [
        {
            "dimension": ", ".join(sorted(names)),
            "sent_bytes": sum(size for label, size in sent.items() if dimensions(label) <= names),
            "estimated_bytes": sum(estimated[name] for name in names),
        }
        for names in merged_dimensions([*sent, *estimated])
    ]


def arithmetic_rows(found: Sequence[Mapping[str, str | int]]) -> list[Config]:
    """Return the FLOPs of each kind of operator by moment."""
    kinds = dict.fromkeys(str(row["kind"]) for row in found)
    moments = dict.fromkeys(str(row["moment"]) for row in found)
    flops = {(row["kind"], row["moment"]): row["flops"] for row in found}
    return [
        {"kind": kind} | {f"{moment}_flops": flops.get((kind, moment), 0) for moment in moments}
        for kind in kinds
    ]
