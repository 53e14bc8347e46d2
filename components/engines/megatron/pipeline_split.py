"""The layers of each pipeline stage, split as Megatron splits them but without importing it."""

import re

from components.contracts.errors import ConfigError
from components.engines.megatron.layout import Layout
from components.engines.shared.parallel_dims import divisors, suggest_sizes


def check_stages(layout: Layout, num_layers: int) -> None:
    """Check that the layers can be split over the pipeline stages.

    Raises:
        ConfigError: if ``num_layers`` cannot be split over the stages and their chunks as configured.
    """
    if layout.pipeline_layout is not None:
        check_layout_string(layout.pipeline_layout, layout.pp, layout.vpp, num_layers)
    elif layout.first_stage_layers is not None or layout.last_stage_layers is not None:
        check_uneven(layout, num_layers)
    else:
        check_even(layout.pp, layout.vpp, num_layers)


def check_even(pp: int, vpp: int, num_layers: int) -> None:
    if num_layers % pp:
        fitting = [size for size in range(1, num_layers + 1) if num_layers % (size * vpp) == 0]
        other = f"use {suggest_sizes(pp, fitting)}, or set" if fitting else "set"
        raise ConfigError(
            f"parallelism.pp: {pp} does not divide num_hidden_layers = {num_layers} of this model; {other} "
            "the layers of each stage with first_stage_layers, last_stage_layers or pipeline_layout."
        )
    if num_layers // pp % vpp:
        raise ConfigError(
            f"parallelism.vpp: {vpp} does not divide the {num_layers // pp} layers of each of {pp} stages; "
            f"use {suggest_sizes(vpp, divisors(num_layers // pp))}."
        )


def check_uneven(layout: Layout, num_layers: int) -> None:
    """Check the given sizes of the first and last stage; the other stages split the rest evenly.

    Raises:
        ConfigError: if the layers of a stage cannot be split into its chunks, or the rest is not divisible.
    """
    ends = {"first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers}
    given = {key: layers for key, layers in ends.items() if layers is not None}
    for key, layers in given.items():
        if layers % layout.vpp:
            raise ConfigError(
                f"parallelism.{key}: {layers} layers cannot be cut into vpp = {layout.vpp} chunks; "
                f"use a multiple of {layout.vpp}."
            )
    left, stages = num_layers - sum(given.values()), layout.pp - len(given)
    if left < 0 or (left > 0 and not stages) or (stages and (left == 0 or left % (stages * layout.vpp))):
        words = " + ".join(f"{key} = {layers}" for key, layers in given.items())
        chunks = stages * layout.vpp
        needed = f"a positive multiple of {chunks}" if chunks else "none"
        raise ConfigError(
            f"parallelism.{next(iter(given))}: {words} leaves {left} of {num_layers} layers to {stages} "
            f"other stage(s) of vpp = {layout.vpp} chunks; leave {needed}."
        )


def check_layout_string(text: str, pp: int, vpp: int, num_layers: int) -> None:
    """Check that a layout string has one part per chunk and all layers, between the embedding and the loss.

    Raises:
        ConfigError: if it does not, or if it has an unknown symbol.
    """
    parts = parse_layout(text)
    if len(parts) != pp * vpp:
        raise ConfigError(
            f"parallelism.pipeline_layout: {text!r} has {len(parts)} parts, but pp x vpp = {pp} x {vpp}; "
            f"give {pp * vpp} parts, separated by |, or other sizes."
        )
    layers = "".join(parts)
    if layers[:1] != "E" or layers[-1:] != "L" or layers.count("E") != 1 or layers.count("L") != 1:
        raise ConfigError(
            f"parallelism.pipeline_layout: {text!r} must begin with E (the embedding) and end with L "
            "(the loss), and have each once."
        )
    if layers.count("t") != num_layers:
        raise ConfigError(
            f"parallelism.pipeline_layout: {text!r} has {layers.count('t')} layers (t), this model has "
            f"{num_layers}; give {num_layers}."
        )


def parse_layout(text: str) -> list[str]:
    """Split ``Et*2|(t|)*2tL`` into ``["Ett", "t", "t", "tL"]``, the contents of each chunk in layer order.

    In Megatron's grammar commas are ignored, and ``(...)*n`` and ``x*n`` repeat.

    Raises:
        ConfigError: if anything other than E, t, L and | is left.
    """
    plain = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    if strange := re.search(r"[^EtL|]", plain):
        raise ConfigError(
            f"parallelism.pipeline_layout: {text!r}: {strange[0]!r} is not a known symbol; write E "
            "(embedding), t (a layer), L (loss), | (the next chunk), x*n and (...)*n."
        )
    return plain.split("|")


def add_mtp_layers(text: str | None, number: int) -> str | None:
    """Insert ``number`` MTP layers (m) before the loss in the layout string ``text``, as Megatron expects."""
    if text is None or not number:
        return text
    return "|".join(parse_layout(text)).removesuffix("L") + "m" * number + "L"


def chunk_layers(layout: Layout, num_layers: int) -> list[list[str]]:
    """Return for each stage the contents of its chunks, such as ``Ett``; see ``parse_layout``.

    ``check_stages`` must have passed.
    """
    if layout.pipeline_layout is not None:
        parts = parse_layout(layout.pipeline_layout)
    else:
        layers = layers_by_stage(layout, num_layers)
        parts = ["t" * (layers[chunk % layout.pp] // layout.vpp) for chunk in range(layout.pp * layout.vpp)]
        parts[0] = "E" + parts[0]
        parts[-1] += "L"
    return [parts[stage :: layout.pp] for stage in range(layout.pp)]


def layers_of_chunks(layout: Layout, num_layers: int) -> list[int]:
    """Return the number of layers of every chunk of all stages."""
    return [chunk.count("t") for stage in chunk_layers(layout, num_layers) for chunk in stage]


def layers_by_stage(layout: Layout, num_layers: int) -> list[int]:
    """Return the number of layers of each stage; stages without a given number split the rest evenly."""
    ends = {0: layout.first_stage_layers, layout.pp - 1: layout.last_stage_layers}
    given = {stage: layers for stage, layers in ends.items() if layers is not None}
    each = (num_layers - sum(given.values())) // max(layout.pp - len(given), 1)
    return [given.get(stage, each) for stage in range(layout.pp)]


def numbered(layout: Layout, num_layers: int, mtp: int = 0) -> list[list[int]]:
    """Return the layer numbers of each stage, chunk after chunk.

    The last stage also holds the ``mtp`` MTP layers, numbered from ``num_layers``.
    """
    chunks = chunk_layers(layout, num_layers)
    found: list[list[int]] = [[] for _ in chunks]
    first = 0
    for chunk in range(layout.vpp):
        for stage, own in enumerate(chunks):
            end = first + own[chunk].count("t")
            found[stage] += range(first, end)
            first = end
    found[-1] += range(num_layers, num_layers + mtp)
    return found
