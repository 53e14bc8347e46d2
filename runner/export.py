"""``python -m runner.export adapter=DIR merge=true output=DIR``: a trained adapter as a model of its own.

base=DIR    the model, where it is not where the adapter says
dtype=fp32  or bf16, of the written weights
"""

import sys
from collections.abc import Sequence

from runner.cli import exit_code
from runner.errors import ConfigError
from runner.provenance import did_you_mean

KEYS = {"adapter": None, "output": None, "merge": ("true",), "base": None, "dtype": ("fp32", "bf16")}
"""And the values that a key may have; None: any."""


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        ConfigError: not KEY=VALUE, an unknown key or value, or one that is missing.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals:
            raise ConfigError(f"{argument}: is none of the keys, as KEY=VALUE; {did_you_mean(key, KEYS)}")
        allowed = KEYS[key]
        if allowed is not None and value not in allowed:
            raise ConfigError(f"{argument}: must be {' or '.join(allowed)}.")
        given[key] = value
    for key in ("adapter", "output", "merge"):
        if key not in given:
            why = "; without it, the adapter's own folder is the export" if key == "merge" else ""
            raise ConfigError(f"{key}: is missing{why}. Usage: {(__doc__ or '').splitlines()[0]}")
    return given


def export(arguments: Sequence[str]) -> None:
    given = parse(arguments)
    from components.adapters.merge import merge_adapter
    from runner.train import DTYPES

    dtype = DTYPES[given.get("dtype", "fp32")]
    print(merge_adapter(given["adapter"], given["output"], base=given.get("base"), dtype=dtype))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: export(sys.argv[1:])))
