"""The ``parallelism`` group."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from components.contracts.engine import Engine, EngineOptions


class ParallelismSpec(Protocol):
    """The ``parallelism`` group: a layout, and how to build its engine.

    ``components.preflight`` estimates memory and time for the types that it knows.
    """

    computes_prefixes: ClassVar[bool]
    """Whether the engine supports a ``Batch`` with ``prefix_lengths``."""

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        """Return the number of ranks, or raise ConfigError if it does not fit WORLD_SIZE."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks, over which a global batch is split."""

    def check(self, model: Any, optimizer: Any, options: EngineOptions, *, world_size: int) -> None:
        """Raise ConfigError if the layout does not fit the run.

        It is called once, before any rank starts. ``model`` is the transformers model on the meta device,
        without its adapter.
        """

    def build(self, model: Any, optimizer: Any, options: EngineOptions) -> Engine:
        """Join the process group and build this rank's engine; collective over all ranks."""
