"""``parallelism=single`` and ``parallelism=fsdp2``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from components.engines import process_group
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.parallelize import ActivationCheckpointing, blocks
from components.engines.layout import world_size
from components.models import ModelSpec
from components.optimizers import Optimizer
from runner.errors import ConfigError


@dataclass(frozen=True)
class FSDP2:
    """Every parameter is sharded over ``dp`` ranks; a global batch is split over them too."""

    dp: int | None
    """Data-parallel ranks; None: WORLD_SIZE, else the visible GPUs, else ``default_dp``."""
    default_dp: int
    reshard_after_forward: bool
    """Free the gathered weights of a block between its forward and its backward."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward computes again: nothing, every block, or attention alone."""

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise ConfigError(f"parallelism.dp: must be at least 1, got {self.dp}.")

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        return world_size(
            dp=self.dp, default_dp=self.default_dp, model_ranks=1, environ=environ, num_gpus=num_gpus
        )

    def data_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""
        return world_size

    def check(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,  # noqa: ARG002  every optimizer, dtype and device will do
        *,
        dtype: torch.dtype,  # noqa: ARG002
        device: Literal["cpu", "cuda"],  # noqa: ARG002
    ) -> None:
        """
        Raises:
            ConfigError: the model has no blocks that could be sharded.
        """
        blocks(model)

    def build(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        *,
        seed: int,
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
        with_reference: bool,
        count_zeros: bool,
    ) -> FSDP2Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
        local = process_group.join(device)
        try:
            return FSDP2Engine(
                model,
                optimizer,
                seed=seed,
                dtype=dtype,
                device=local,
                reshard_after_forward=self.reshard_after_forward,
                activation_checkpointing=self.activation_checkpointing,
                with_reference=with_reference,
                count_zeros=count_zeros,
            )
        except BaseException:
            process_group.leave_alone()
            raise
