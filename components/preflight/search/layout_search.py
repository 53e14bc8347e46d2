"""``preflight.mode=plan``: a search for the layouts with the shortest estimated step time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.engines.shared.recomputation import RECOMPUTED_MORE
from components.models.experts import number_of_experts
from components.optimizers import SGD
from components.preflight.engine_layouts import EngineLayout
from components.preflight.estimates.step_time import StepTime, StepWork, step_time, step_work
from components.preflight.forecast_report import Report, device_section, short_rows_line
from components.preflight.formatting import as_seconds, as_size
from components.preflight.search.candidate import Candidate
from components.preflight.search.fsdp2_layouts import enumerate_layouts as fsdp2_layouts
from components.preflight.search.megatron_layouts import enumerate_layouts as megatron_layouts

DEFAULTS: Mapping[str, EngineLayout] = {"fsdp2": FSDP2(), "megatron": Megatron()}
"""Default layout of each ``parallelism=NAME``, which the search varies. Overrides omit its values."""

SHOWN = 6


@dataclass(frozen=True)
class PlanResult:
    """A mesh with its fastest activation checkpointing and micro-batch size that fit."""

    candidate: Candidate
    overrides: tuple[str, ...]
    time: StepTime


def search(case: Candidate, work: StepWork, devices: int) -> list[PlanResult]:
    """Return the fastest ``SHOWN`` meshes of both engines, each with its fastest variant that fits.

    Validity and memory are checked in the order of step times, because these checks cost more than an
    estimate of the time.

    Raises:
        ConfigError: if no layout of ``devices`` fits.
    """
    bases = {n: on for n, mesh in enumerate(meshes(case, devices)) if (on := candidate_on(mesh, case))}
    timed = [(step_time(variant, work), n, variant) for n in bases for variant in variants(bases[n][1])]
    found: dict[int, PlanResult] = {}
    borne: dict[int, bool] = {}
    for time, n, variant in sorted(timed, key=lambda each: each[0].total):  # equal times keep their order
        engine, base = bases[n]
        if n not in borne:
            borne[n] = is_valid(base)
        if borne[n] and n not in found and variant.fits():
            found[n] = PlanResult(variant, plan_overrides(engine, variant), time)
        if len(found) == SHOWN:
            break
    if not found:
        raise ConfigError(
            f"preflight.devices: no layout of {devices} device(s) with {as_size(case.device.memory)} each "
            f"holds this run and divides run.global_batch_size={case.data.global_batch_size}; use more "
            "devices or another global batch, lower data.max_length, or train an adapter (adapter=lora)."
        )
    return list(found.values())


def meshes(case: Candidate, devices: int) -> Iterator[tuple[str, Config]]:
    """Yield the engine's name and the keys of ``parallelism`` for every layout of ``devices`` devices."""
    layers, per_node = case.model.config.get_text_config().num_hidden_layers, case.device.per_node
    sharded = not isinstance(case.optimizer, SGD)
    experts = number_of_experts(case.model)
    yield from (("fsdp2", keys) for keys in fsdp2_layouts(devices, per_node, experts=experts))
    yield from (
        ("megatron", keys)
        for keys in megatron_layouts(devices, per_node, layers, sharded=sharded, experts=experts)
    )


def candidate_on(mesh: tuple[str, Config], case: Candidate) -> tuple[str, Candidate] | None:
    """Return the engine, and ``case`` on a mesh with the smallest micro-batch.

    None means that the mesh is invalid.
    """
    engine, keys = mesh
    try:
        base = replace(case, layout=DEFAULTS[engine]).with_layout(keys)
    except ConfigError:
        return None
    sizes = base.micro_batches
    return (engine, replace(base, micro_batch_size=sizes[0])) if sizes else None


def variants(base: Candidate) -> list[Candidate]:
    """Return variants of ``base`` by activation checkpointing, the least first, and by micro-batch size."""
    return [
        replace(base.with_layout({"activation_checkpointing": kind}), micro_batch_size=size)
        for kind in RECOMPUTED_MORE
        for size in base.micro_batches
    ]


def is_valid(base: Candidate) -> bool:
    """Return whether ``base`` fits with full activation checkpointing and the engine supports the run.

    The smallest or the largest micro-batch needs the least memory: with one micro-batch per step, gradients
    are not accumulated.
    """
    frugal, sizes = base.with_layout({"activation_checkpointing": "full"}), base.micro_batches
    if not any(replace(frugal, micro_batch_size=size).fits() for size in {sizes[0], sizes[-1]}):
        return False
    try:
        base.check()
    except ConfigError:
        return False
    return True


def plan_overrides(engine: str, case: Candidate) -> tuple[str, ...]:
    """Return the command-line overrides that select ``case``."""
    usual, keys = vars(DEFAULTS[engine]), vars(case.layout)
    given = {key: str(value).lower().replace("'", "") for key, value in keys.items() if value != usual[key]}
    changed = [f"parallelism.{key}={value}" for key, value in given.items()]
    return (f"parallelism={engine}", *changed, f"run.micro_batch_size={case.micro_batch_size}")


def plan(case: Candidate, devices: int) -> Report:
    """Return a report of the fastest layouts of ``devices`` devices that fit into memory, fastest first.

    Raises:
        ConfigError: if no layout fits.
    """
    work = step_work(case)
    found = search(case, work, devices)
    rows: list[Config] = [
        {"overrides": " ".join(each.overrides), "memory": each.candidate.peak.total, **each.time.to_json()}
        for each in found
    ]
    texts = [
        f"{as_seconds(row['seconds'])} a step, {as_size(row['memory'])} a rank: {row['overrides']}"
        for row in rows
    ]
    texts += refused_engines(case, devices, found)
    return Report(
        {"device": device_section(case), "plan": rows},
        {"plan": "\n".join(texts), "short rows": short_rows_line(case)},
    )


def refused_engines(case: Candidate, devices: int, found: Sequence[PlanResult]) -> list[str]:
    """Return a line for each engine without a layout in ``found`` that refuses the run on its first mesh."""
    lines, absent = [], {*DEFAULTS} - {each.overrides[0].partition("=")[2] for each in found}
    for engine in sorted(absent):
        tried = (candidate_on(mesh, case) for mesh in meshes(case, devices) if mesh[0] == engine)
        first = next(filter(None, tried), None)
        try:
            if first is not None:
                first[1].check()
        except ConfigError as error:
            lines.append(f"none with parallelism={engine}: {error}")
    return lines
