"""A table of the keys of the composed config and the classes that read them."""

from collections.abc import Iterator, Mapping

from components.contracts.json_types import Config, Json

RUN = "runner.config.run_config.RunConfig"


def key_rows(config: Config) -> list[Json]:
    """Return one row per key with the class that reads it.

    Keys below a ``_target_`` are arguments of that class (unknown ones have been rejected); the runner reads
    all others.
    """
    return [
        {"key": key, "value": value, "reader": reader} for key, value, reader in flatten_rows("", config, RUN)
    ]


def flatten_rows(prefix: str, node: object, reader: str) -> Iterator[tuple[str, object, str]]:
    if not isinstance(node, Mapping) or not node:
        scalar = node is None or isinstance(node, bool | int | float | str)
        yield prefix, node if scalar else str(node), reader
        return
    own = node.get("_target_", reader)
    for key, value in node.items():
        if key == "_target_":
            yield f"{prefix}.{key}".lstrip("."), value, "runner.config.instantiate.build_component"
        else:
            yield from flatten_rows(f"{prefix}.{key}".lstrip("."), value, own)
