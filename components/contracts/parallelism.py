"""The ``parallelism`` group: a layout, and how to build its engine."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from components.contracts.engine import Engine, EngineOptions


class ParallelismSpec(Protocol):
    """The ``parallelism`` group: a layout, and how to build its engine.

    ``components.preflight`` forecasts the memory and the time of those that it knows by their type.
    """

    computes_prefixes: ClassVar[bool]
    """Whether its engine takes a ``Batch`` with ``prefix_lengths``."""

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        """Ranks of the run; ConfigError where they do not fit WORLD_SIZE."""

    def dp_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""

    def check(self, model: Any, optimizer: Any, options: EngineOptions, *, world_size: int) -> None:
        """Raises ConfigError where the layout does not fit the run; called once, before any rank starts.

        ``model`` is the transformers model on the meta device, without its adapter.
        """

    def build(self, model: Any, optimizer: Any, options: EngineOptions) -> Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
