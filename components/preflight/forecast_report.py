"""The results of preflight as tables for a terminal and as preflight.json."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from components.contracts.data import BatchShard
from components.contracts.json_types import Config
from components.data.loader import PreparedData
from components.preflight.config_keys import key_rows
from components.preflight.engine_layouts import mesh_info
from components.preflight.estimates.step_time import StepWork, parameter_counts, step_time, step_work
from components.preflight.formatting import as_count, as_seconds, as_size
from components.preflight.search.candidate import Candidate
from components.preflight.search.rank_groups import group_lines, group_rows

Scalars = Config
Section = Scalars | Sequence[Scalars]


@dataclass(frozen=True)
class Report:
    """Sections by name, each an object of scalars or a list of such objects, and one-line summaries."""

    sections: Mapping[str, Section]
    lines: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps(self.sections, indent=2) + "\n"

    def render(self) -> Table:
        """Return the summaries, one line each."""
        table = Table.grid(padding=(0, 2))
        for name, line in self.lines.items():
            table.add_row(name, line)
        return table

    def render_all(self) -> RenderableType:
        """Return a table per section, except groups, keys and plan, of which only the summaries are shown."""
        whole = [name for name in self.sections if name not in IN_A_LINE]
        short = Table.grid(padding=(0, 2))
        for name in IN_A_LINE:
            if self.lines.get(name):
                short.add_row(name, self.lines[name])
        return Group(*(tabulate(name, self.sections[name]) for name in whole), short)


NO_FORECAST = "none of memory and time: the layout, the optimizer or the adapter is of a class of your own"

IN_A_LINE = ("groups", "keys", "plan", "short rows")


def survey(case: Candidate | None, config: Config) -> Report:
    """Return a report of all estimates for ``case``, and of the class that reads each key of ``config``.

    None means that the layout, the optimizer or the adapter is of a user's own class; the report then has
    only the keys. With ``run.evaluate_only``, no summary describes train steps.
    """
    evaluates = config["run"]["evaluate_only"]
    if case is None:
        return Report({"keys": list(key_rows(config))}, {} if evaluates else {"forecast": NO_FORECAST})
    work = step_work(case)
    sections: dict[str, Section] = {
        "layout": layout_section(case),
        "groups": group_rows(case.layout, case.world_size),
        "batch": batch_section(case, work),
        "parameters": parameter_counts(case),
        "device": device_section(case),
        "memory": memory_section(case),
        "step": step_section(case, work),
        "keys": list(key_rows(config)),
    }
    if not sections["groups"]:  # one rank has none
        del sections["groups"]
    return Report(sections, evaluation_lines(case) if evaluates else summary_lines(case, work, sections))


def layout_section(case: Candidate) -> Scalars:
    """Return the number of ranks and the sizes of the mesh, outermost first."""
    dims = mesh_info(case.layout, case.world_size)["dims"]
    return {"ranks": case.world_size, "parallelism": type(case.layout).__name__, **dims}


def batch_section(case: Candidate, work: StepWork) -> Scalars:
    """Return the sizes of a step; sequences, tokens and labels are means over the first steps."""
    workload = case.microbatch
    return {
        "rows": case.rows_per_step,
        "data_ranks": case.dp_size,
        "microbatches_per_rank": workload.num_microbatches,
        "rows_per_microbatch": case.micro_batch_size,
        "sequences": work.sequences,
        "tokens": work.tokens,
        "labels": work.labels,
        "tokens_of_largest_microbatch": workload.rows * workload.length,
        "labels_of_largest_microbatch": workload.labels,
        "steps": case.data.num_steps,
    }


def memory_section(case: Candidate) -> list[Scalars]:
    """Return the bytes of each part on a rank of each pipeline stage; "(host)" marks host memory."""
    ranks = case.memory
    names = list(dict.fromkeys(name for rank in ranks for name in rank.parts))
    hosts = list(dict.fromkeys(name for rank in ranks for name in rank.host))
    return [
        {
            "stage": rank.stage,
            **{name: rank.parts.get(name, 0) for name in names},
            "total": rank.total,
            **{f"{name} (host)": rank.host.get(name, 0) for name in hosts},
        }
        for rank in ranks
    ]


def device_section(case: Candidate) -> Scalars:
    """Return the assumptions of the forecast about the device; speeds are per rank."""
    device = case.device
    return {
        "name": device.name,
        "memory": device.memory,
        "peak_flops": device.flops,
        "assumed_mfu": device.mfu,
        "link_bytes_per_s": device.link,
        "network_bytes_per_s": device.network,
    }


def step_section(case: Candidate, work: StepWork) -> Scalars:
    time = step_time(case, work)
    return {"flops": work.flops, **time.to_json(), "tokens_per_s": work.tokens / time.total}


def summary_lines(case: Candidate, work: StepWork, sections: Mapping[str, Section]) -> dict[str, str]:
    """Return a one-line summary of each section."""
    time, workload, device = step_time(case, work), case.microbatch, case.device
    counts, most = parameter_counts(case), case.peak
    dims = mesh_info(case.layout, case.world_size)["dims"]
    trained = "all" if counts["trainable"] == counts["total"] else as_count(counts["trainable"])
    parts = sorted(most.parts.items(), key=lambda part: -part[1])[:3]
    stage = f" at pipeline stage {most.stage}" if dims.get("pp", 1) > 1 else ""
    at_most = "" if case.rows_per_step == case.data.global_batch_size else "at most "
    found = {
        **layout_lines(case),
        "length": length_line(case),
        "batch": (
            f"{at_most}{case.rows_per_step} rows a step = "
            f"{case.dp_size} data rank(s) x {workload.num_microbatches} micro-batch(es) x "
            f"{case.micro_batch_size} row(s); about "
            f"{work.tokens:,.0f} tokens, {work.labels:,.0f} labels"
        ),
        "short rows": short_rows_line(case),
        "parameters": f"{size_line(case)}, {trained} trained",
        "memory": (
            f"{as_size(most.total)} of {as_size(device.memory)} ({device.name}){stage}: "
            + ", ".join(f"{name} {as_size(size)}" for name, size in parts)
        ),
        "step": (
            f"{as_count(work.flops)}FLOP, {as_seconds(time.total)} where {device.mfu:.0%} of "
            f"{as_count(device.flops)}FLOP/s a rank is reached"
        ),
        "keys": f"{len(sections['keys'])}, listed in preflight.json with the class that reads each",
    }
    return {name: line for name, line in found.items() if line}


def evaluation_lines(case: Candidate) -> dict[str, str]:
    """Return the summaries for a run that only evaluates."""
    rows = case.data.global_batch_size
    loaders = case.data.eval_loaders(BatchShard(rows, micro_batch_size=1))
    batches = [f"{name}: {loader.num_steps:,}" for name, loader in loaders.items()]
    found = {
        **layout_lines(case),
        "batches": f"{', '.join(batches)}, of at most {rows} rows",
        "parameters": size_line(case),
    }
    return {name: line for name, line in found.items() if line}


def layout_lines(case: Candidate) -> dict[str, str]:
    """Return the summaries of the mesh and of its groups, which are empty for one rank."""
    dims = mesh_info(case.layout, case.world_size)["dims"]
    mesh = " x ".join(f"{name} {size}" for name, size in dims.items() if size > 1)
    return {
        "layout": f"{case.world_size} ranks: {mesh}" if mesh else "1 rank",
        "groups": "; ".join(group_lines(case.layout, case.world_size)),
    }


def size_line(case: Candidate) -> str:
    """Return the number of parameters, and of those that a token uses if it does not use all."""
    counts = parameter_counts(case)
    active = f", {as_count(counts['active'])} active" if counts["active"] < counts["total"] else ""
    return f"{as_count(counts['total'])}{active}"


def length_line(case: Candidate) -> str:
    """Return the length of the run in steps and epochs, as if all epochs were as long as the first one."""
    loader = case.data.train_loader(BatchShard(case.data.global_batch_size, micro_batch_size=1))
    share = loader.epoch(1)
    if case.data.streamed or share is None:
        return f"{case.data.num_steps:,} steps of a stream"
    assert isinstance(case.data, PreparedData)
    _, plans = case.data.train.open()
    rows, size = plans.rows(0), case.data.global_batch_size
    short = f"; an epoch has {rows} of the {size} rows of a step" if rows < size else ""
    return (
        f"{case.data.num_steps:,} steps, {case.data.num_steps * share:,.2f} epochs of "
        f"{1 / share:,.0f} steps{short}"
    )


def short_rows_line(case: Candidate) -> str:
    """Return how far the data fills the largest micro-batch; "" if at least half."""
    assert isinstance(case.data, PreparedData)
    shape, (tokens, _) = case.microbatch, case.data.train.open()
    each = tokens.sequences_per_sample if case.data.packing != "none" else 1
    used, most = shape.rows * shape.length, shape.rows * each * case.max_length // case.cut
    if 2 * used >= most:
        return ""
    return f"the largest micro-batch has {used:,} of at most {most:,} tokens; the forecast is of this data"


def tabulate(name: str, section: Section) -> Table:
    """Render an object as a row per key, a table as a row per object, memory as a column per stage."""
    title = name.replace("_", " ").capitalize()
    table = Table(title=title, title_justify="left", show_header=not isinstance(section, Mapping))
    objects = [section] if isinstance(section, Mapping) else section
    if isinstance(section, Mapping) or name == "memory":
        first, *keys = ["", *section] if isinstance(section, Mapping) else objects[0]
        table.add_column(first)
        for row in objects:
            table.add_column(f"{row[first]}" if first else "", justify="right", overflow="fold")
        for key in keys:
            table.add_row(key.replace("_", " "), *(cell(name, key, row[key]) for row in objects))
        return table
    for key in objects[0]:
        text = isinstance(objects[0][key], str)
        table.add_column(key.replace("_", " "), justify="left" if text else "right", overflow="fold")
    for row in objects:
        table.add_row(*(cell(name, key, value) for key, value in row.items()))
    return table


UNITS: Mapping[str, Callable[[float], str]] = {
    "flops": lambda value: f"{as_count(value)}FLOP",
    "bytes_per_s": lambda value: f"{as_size(value)}/s",
    "mfu": lambda value: f"{value:.0%}",
    "memory": as_size,
    "seconds": as_seconds,
    "per_s": lambda value: f"{value:,.0f}",
    "_s": as_seconds,
    "bytes": as_size,
}
"""Suffix of a key -> format of its value."""


def cell(section: str, key: str, value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if section == "memory":
        return as_size(value)
    show = next((show for end, show in UNITS.items() if key.endswith(end)), UNITS["per_s"])
    return show(value)
