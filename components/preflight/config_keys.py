"""A table of the keys of the composed config and the classes that read them."""

from collections.abc import Iterator, Mapping

from components.contracts.json_types import Json

RUN = "runner.config.run_config.RunConfig"


def key_rows(node: object, prefix: str = "", reader: str = RUN) -> Iterator[Json]:
    """Yield one row per key with the class that reads it.

    ``_target_`` names the class whose arguments are the keys next to it and below them. The runner reads all
    other keys. Unknown keys have been rejected before.
    """
    if not isinstance(node, Mapping) or not node:
        scalar = node is None or isinstance(node, bool | int | float | str)
        yield {"key": prefix, "value": node if scalar else str(node), "reader": reader}
        return
    own = node.get("_target_", reader)
    for name, value in node.items():
        key = f"{prefix}.{name}".lstrip(".")
        if name == "_target_":
            yield {"key": key, "value": value, "reader": "runner.config.instantiate.build_component"}
        else:
            yield from key_rows(value, key, own)
