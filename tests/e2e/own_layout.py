"""A parallelism whose type is neither FSDP2 nor Megatron: ``parallelism._target_=tests...``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from components.contracts.engine import Engine
from components.engines.fsdp2 import FSDP2

BUILDS = FSDP2(dp=1, default_dp=1, reshard_after_forward=False)


@dataclass(frozen=True)
class OneRank:
    """The members of ``ParallelismSpec``, and no others."""

    computes_prefixes: ClassVar[bool] = True

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        return BUILDS.world_size(environ, num_gpus)

    def dp_size(self, world_size: int) -> int:
        return world_size

    def check(self, *args: Any, **options: Any) -> None:
        BUILDS.check(*args, **options)

    def build(self, *args: Any, **options: Any) -> Engine:
        return BUILDS.build(*args, **options)
