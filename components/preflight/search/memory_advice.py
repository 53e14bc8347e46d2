"""Rejection of runs that do not fit in memory, with the cheapest changes that make them fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import NoReturn

import torch

from components.adapters import LoRA
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.engines.fsdp2 import FSDP2
from components.models.experts import is_fully_trained
from components.preflight.engine_layouts import memory_savers
from components.preflight.estimates.step_time import StepWork, step_time, step_work
from components.preflight.formatting import as_size
from components.preflight.search.candidate import Candidate

SHOWN, KEPT, DEPTH = 3, 4, 3
SAVED = 0.1
"""A run that ran out of memory is advised to save at least this share of its estimate."""
SHORTEST = 256
"""Smallest ``data.max_length`` that is advised, in tokens."""


@dataclass(frozen=True)
class Variation:
    """A candidate with some changed keys of the config."""

    candidate: Candidate
    overrides: Mapping[str, str]
    """Key -> value, as on the command line."""
    alters: bool = False
    """Whether the training result changes, and not only memory and time."""

    def vary(self, case: Candidate, overrides: Mapping[str, object], *, alters: bool = False) -> "Variation":
        """Return a variation whose candidate is ``case``, with ``overrides`` added to those of this one.

        ``alters`` means that the added overrides change the training result.
        """
        texts = {key: "null" if value is None else str(value).lower() for key, value in overrides.items()}
        return Variation(case, {**self.overrides, **texts}, self.alters or alters)


def check_fits(case: Candidate, *, evaluates: bool = False) -> None:
    """Raise ConfigError if a rank needs more memory than it has.

    The message contains the largest part of the memory and the cheapest remedies. For a run that only
    evaluates, the weights are compared with the memory, because nothing else is estimated.
    """
    if evaluates:
        check_weights_fit(case)
        return
    if not case.fits_host:
        raise_host_misfit(case)
    most = case.peak
    if most.total <= case.memory_budget:
        return
    part = max(most.parts, key=lambda name: most.parts[name])
    stages = len(case.memory)
    where = f"a rank of pipeline stage {most.stage}" if stages > 1 else "a rank"
    remedies = describe_fixes(case)
    raise ConfigError(
        f"preflight.device_memory: {where} needs {as_size(most.total)} and has {as_size(case.device.memory)} "
        f"({case.device.name}); the largest part is {part} ({as_size(most.parts[part])}). "
        + (f"What fits, the cheapest first: {remedies}; or set {REALLY}." if remedies else NOTHING)
    )


def raise_host_misfit(case: Candidate) -> NoReturn:
    """Raise ConfigError because the ranks of this machine offload more state than it has memory."""
    keys = ("cpu_offload", "optimizer_cpu_offload", "activation_offloading")
    set_here = (f"parallelism.{key}" for key in keys if getattr(case.layout, key, False))
    option = next(set_here, "hook")  # one that averages the weights
    remedies, ranks = describe_fixes(case), min(case.world_size, case.device.per_node)
    fits = f"changes with which it fits on a rank, the cheapest first: {remedies}"
    remedy = fits if remedies else "use more machines"
    raise ConfigError(
        f"{option}: the {ranks} rank(s) of this machine offload {as_size(case.host_memory)} to its memory of "
        f"{as_size(case.device.host or 0)}; {remedy}; or leave {option} out."
    )


def advise_saving(case: Candidate) -> str:
    """Return the cheapest changes for a run that ran out of memory, whatever its estimate, or ""."""
    memory = min(case.device.memory, int(case.peak.total * (1 - SAVED)))
    device = replace(case.device, memory=memory, certain=True)
    changes = describe_fixes(replace(case, device=device))
    if not changes:
        return ""
    return (
        f"Preflight estimated {as_size(case.peak.total)}. Changes with a lower estimate, the cheapest first: "
        f"{changes}."
    )


def check_weights_fit(case: Candidate) -> None:
    """Raise ConfigError if the weights need more memory than a rank has."""
    kept = ("weights", "reference")
    most = max(sum(rank.parts.get(name, 0) for name in kept) for rank in case.memory)
    if most > case.memory_budget:
        raise ConfigError(
            f"preflight.device_memory: the weights need {as_size(most)} on a rank, which has "
            f"{as_size(case.device.memory)} ({case.device.name}); use a layout with more ranks, such as "
            f"parallelism=fsdp2 parallelism.dp=N, or set {REALLY}."
        )


REALLY = "preflight.device_memory to the actual memory (fused kernels need less than is estimated)"
NOTHING = (
    "No few changes of micro-batch, recomputation or layout suffice; find a layout with "
    f"preflight.mode=plan preflight.devices=N, use a smaller model, or set {REALLY}."
)


def describe_fixes(case: Candidate) -> str:
    """Format the ``cheapest_fixes`` of ``case``. The text is empty if there are none."""
    work = step_work(case)
    return "; ".join(describe_change(change, case, work) for change in cheapest_fixes(case, work))


def describe_change(change: Variation, case: Candidate, work: StepWork) -> str:
    """Format a change as ``run.micro_batch_size=1 (61.2 GiB, device time +3 %)``."""
    before, after = (step_time(each, work).total * each.world_size for each in (case, change.candidate))
    facts = [as_size(change.candidate.peak.total)]
    if change.candidate.world_size != case.world_size:
        facts.append(f"{change.candidate.world_size} ranks")
    facts.append("training differs" if change.alters else f"device time {100 * (after / before - 1):+.0f} %")
    typed = " ".join(f"{key}={value}" for key, value in change.overrides.items())
    return f"{typed} ({', '.join(facts)})"


def cheapest_fixes(case: Candidate, work: StepWork) -> list[Variation]:
    """Return at most ``SHOWN`` changes with which a run fits, with different keys and as few as possible.

    Changes that keep the result of training come first, then those that keep the number of ranks, then those
    with less device time. Changes of several keys are built from the ``KEPT`` changes that are nearest to
    fitting.
    """

    def cost(change: Variation) -> tuple[bool, bool, float]:
        ranks = change.candidate.world_size
        return change.alters, ranks > case.world_size, step_time(change.candidate, work).total * ranks

    found: dict[frozenset[str], Variation] = {}
    kept = [Variation(case, {})]
    for _ in range(DEPTH):
        tried = [next_one for change in kept for next_one in variations(change)]
        fitting = [change for change in tried if change.candidate.fits()]
        for change in sorted(fitting, key=cost):
            if not any(keys <= change.overrides.keys() for keys in found):
                found[frozenset(change.overrides)] = change
        if len(found) >= SHOWN:
            break
        short = [change for change in tried if not change.candidate.fits()]
        kept = sorted(short, key=lambda change: change.candidate.peak.total)[:KEPT]
    return sorted(found.values(), key=cost)[:SHOWN]


def variations(change: Variation) -> Iterator[Variation]:
    """Yield ``change`` with each further change that layout, batch and model allow."""
    for next_one in candidates(change):
        try:
            next_one.candidate.check()
        except ConfigError:
            continue
        yield next_one


def layout_overrides(case: Candidate, keys: Config) -> Json:
    """Return the overrides that change ``keys`` of the layout; ``case`` has the changed layout.

    An option such as ``parallelism=single`` lacks keys of larger layouts. Then the option with all keys of
    the engine is chosen, and every key is given that differs from its default there.
    """
    if keys.keys() <= case.layout_keys:
        return {f"parallelism.{key}": value for key, value in keys.items()}
    set_here = {each.name: getattr(case.layout, each.name) for each in fields(case.layout)}
    changed = {each.name for each in fields(case.layout) if set_here[each.name] != each.default}
    others = {f"parallelism.{key}": set_here[key] for key in sorted(changed - {"default_dp"})}
    return {"parallelism": "fsdp2" if isinstance(case.layout, FSDP2) else "megatron", **others}


def candidates(change: Variation) -> Iterator[Variation]:
    case = change.candidate
    for size in case.micro_batches:  # larger ones too: with one per step, gradients are not accumulated
        if size != case.micro_batch_size:
            yield change.vary(replace(case, micro_batch_size=size), {"run.micro_batch_size": size})
    for keys in memory_savers(case.layout, case.world_size):
        try:
            relaid = case.with_layout(keys)
        except ConfigError:
            continue
        yield change.vary(relaid, layout_overrides(relaid, keys))
    synced = getattr(case.loss, "sync_reference_every", 0) > 0  # needs a frozen reference and no adapter
    if case.reference == "frozen" and case.loss.kind != "text" and not (synced or case.data.streamed):
        yield change.vary(replace(case, reference="none"), {"stage.reference": "precomputed"})
    if case.dtype == torch.float32:
        yield change.vary(replace(case, dtype=torch.bfloat16), {"run.dtype": "bf16"}, alters=True)
    if case.max_length // case.cut > SHORTEST:
        shorter = {"data.max_length": case.max_length // (2 * case.cut)}
        yield change.vary(replace(case, cut=2 * case.cut), shorter, alters=True)
    source, by_head = getattr(case.loss, "reference", "auto"), getattr(case.optimizer, "head_dim", None)
    trains_all = case.adapter is None and is_fully_trained(case.model) and case.may_add_adapter
    if trains_all and not synced and by_head is None:
        adapted = replace(case, adapter=LoRA())
        if case.reference == "frozen" and case.reference_model is None and source == "auto":
            adapted = replace(adapted, reference="adapter_off")
        yield change.vary(adapted, {"adapter": "lora"}, alters=True)
    # The reference is then the model in full precision, which a policy in 4 bits may not have.
    in_full_precision = "precomputed" in (source, change.overrides.get("stage.reference"))
    in_full_precision |= case.reference == "frozen" and case.reference_model is None
    lora = None if in_full_precision else case.adapter
    if lora is not None and not (lora.quantize or lora.dora or lora.is_pissa):
        quantized = replace(case, adapter=replace(lora, quantize="nf4"))
        key = {"adapter": "qlora"} if "adapter" in change.overrides else {"adapter.quantize": "nf4"}
        yield change.vary(quantized, key, alters=True)
