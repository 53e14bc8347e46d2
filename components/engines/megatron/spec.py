"""``parallelism=megatron`` and its named sizes (``tp2``, ``pp2vpp2``, ``tp2cp2``, ...)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from components.engines import process_group
from components.engines.layout import world_size
from components.engines.megatron.checks import check_keys, check_run, why_no_transformer_engine
from components.models import ModelSpec
from components.optimizers import Optimizer

if TYPE_CHECKING:
    from components.engines.megatron.runtime.engine import MegatronEngine


@dataclass(frozen=True)
class Megatron:
    """Tensor, pipeline, context and data parallelism by Megatron-Core, on GPUs or on gloo ranks of a CPU."""

    tp: int
    """Ranks that split every matrix, and the vocabulary."""
    pp: int
    """Pipeline stages."""
    vpp: int
    """Chunks of layers that every stage holds (interleaved pipeline); 1: one."""
    cp: int
    """Ranks that split every sequence."""
    dp: int | None
    """Data-parallel ranks; None: what WORLD_SIZE or the visible GPUs leave, else ``default_dp``."""
    default_dp: int
    sequence_parallel: bool
    """Split what tensor parallelism replicates (norms, residuals) over its ranks, by position."""
    cp_comm_type: Literal["all_gather", "a2a"]
    """How ranks of ``cp`` see each other's tokens: keys and values gathered, or heads for positions."""
    distributed_optimizer: bool
    """Shard optimizer state and fp32 main parameters over dp x cp."""
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: int | None
    """Gradients a bucket reduces at once, in elements; None: Megatron's default."""
    pipeline_layout: str | None
    """Megatron's layout string, a part for every chunk of every stage, in the order of layers."""
    first_stage_layers: int | None
    last_stage_layers: int | None
    activation_checkpointing: Literal["none", "full", "selective"]
    """What is computed again in the backward: nothing, every layer, or attention alone."""
    transformer_impl: Literal["auto", "local", "transformer_engine"]
    """auto: transformer-engine where it is installed and can compute the run."""
    optimizer_cpu_offload: bool

    def __post_init__(self) -> None:
        check_keys(self)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        return world_size(
            dp=self.dp,
            default_dp=self.default_dp,
            model_ranks=self.model_ranks,
            environ=environ,
            num_gpus=num_gpus,
        )

    def data_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""
        return world_size // self.model_ranks

    def check(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
    ) -> None:
        """
        Raises:
            ConfigError: Megatron, or our engine on top of it, cannot do this, or would do it wrongly.
        """
        check_run(self, model, optimizer, dtype=dtype, device=device)

    def uses_transformer_engine(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: Literal["cpu", "cuda"]
    ) -> bool:
        """Whether layers are those of transformer-engine; what ``check`` let pass."""
        if self.transformer_impl == "local":
            return False
        return why_no_transformer_engine(config, self, dtype, device) is None

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
    ) -> "MegatronEngine":
        """Joins the process group and builds this rank's engine; every rank calls it."""
        from components.engines.megatron.runtime.engine import MegatronEngine

        local = process_group.join(device)
        try:
            return MegatronEngine(
                model,
                optimizer,
                self,
                seed=seed,
                dtype=dtype,
                device=local,
                with_reference=with_reference,
                count_zeros=count_zeros,
            )
        except BaseException:
            process_group.leave_alone()
            raise
