"""The sizes of ``parallelism=megatron``, which split the model and the data over ranks."""

from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.device import DeviceKind
from components.contracts.json_types import Config
from components.engines.shared.recomputation import Module


@dataclass(frozen=True)
class Layout:
    """The keys of conf/parallelism/megatron.yaml, with its default values."""

    tp: int = 1
    """Number of tensor-parallel ranks, which split every matrix and the vocabulary."""
    pp: int = 1
    """Number of pipeline stages."""
    vpp: int = 1
    """Number of chunks of layers per pipeline stage; more than 1 means the interleaved schedule."""
    cp: int = 1
    """Number of context-parallel ranks, which split every sequence by position."""
    ep: int = 1
    """Number of expert-parallel ranks, among the tp x cp x dp ranks, that divide the experts of a layer."""
    etp: int = 1
    """Number of expert-tensor-parallel ranks, which split the matrices of every expert."""
    dp: int | None = None
    """Number of data-parallel ranks. None means as many as fill the launcher's WORLD_SIZE, or without a
    launcher the visible GPUs, or without GPUs ``default_dp``."""
    default_dp: int = 1
    sequence_parallel: bool = False
    """Whether norms and residuals are split over tp ranks by position, instead of replicated."""
    cp_comm_type: Literal["all_gather", "a2a"] = "all_gather"
    """Communication of attention under ``cp``: all-gather of keys and values, or all-to-all of heads."""
    distributed_optimizer: bool = False
    """Whether optimizer state and fp32 master weights are sharded over dp x cp."""
    overlap_grad_reduce: bool = True
    """Whether reductions of gradients begin in the backward pass of a step's last micro-batch: by bucket on
    the first pipeline stage, and at the end of this pass on others, to which Megatron gives one bucket."""
    overlap_param_gather: bool | None = None
    """Whether weights that the distributed optimizer has updated are gathered during the next forward pass.
    None means yes with ``overlap_grad_reduce``, unless the optimizer updates full (unsharded) weights or is
    in host memory."""
    bucket_size: int | None = None
    """Number of gradient elements per reduction bucket. None means Megatron's default."""
    pipeline_layout: str | None = None
    """Megatron's layout string, with one part per chunk of every stage, in the order of the layers."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """The parts recomputed in the backward pass: nothing, every layer, or only core attention
    or other modules of every layer."""
    recompute_num_layers: int | None = None
    """With ``activation_checkpointing=full``: number of layers that are recomputed in each chunk (``vpp``),
    from its first one on. None means all. MTP layers are always recomputed too, and do not count."""
    recompute_modules: tuple[Module, ...] | None = None
    """With ``activation_checkpointing=selective``: the modules of every layer that are recomputed. None means
    only ``core_attn``."""
    activation_offloading: bool = False
    """Whether activations of layers are in host memory between the forward and the backward pass."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the layers; auto uses transformer-engine if it is installed, supports the run and has
    a fast kernel for packed rows on this GPU."""
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Megatron's name of the recipe by which ``run.dtype=fp8`` rounds: with one scale per matrix, or with
    scales of blocks of it."""
    bias_activation_fusion: bool | None = None
    """Whether SwiGLU is one function that saves only its input. None means yes on GPUs, where it is compiled
    if Triton, a C compiler and the headers of Python are installed."""
    gradient_accumulation_fusion: bool | None = None
    """Whether the gradient of a weight is added to the main gradient, in fp32, by its matrix product. None
    means yes on GPUs, except with transformer-engine or ``activation_offloading``."""
    optimizer_cpu_offload: bool = False
    moe_token_dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """Token exchange: all-gather over the ep x etp ranks, or all-to-all to the chosen experts' ranks."""
    moe_grouped_gemm: bool | None = None
    """Whether the experts of a rank are stacked in two parameters and computed together, in bf16 on GPUs of
    compute capability 9.x or 10.x by one grouped product per projection. None means that they are, except if
    an adapter targets experts."""
    capacity_factor: float | None = None
    """Maximum load of an expert, as a multiple of its even share of a rank's tokens. None means no limit."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """The tokens kept if an expert is over capacity: those with the largest weights, or the first."""
    moe_pad_to_capacity: bool = False
    """Whether every expert's input is padded to its capacity."""
    moe_permute_fusion: bool = False
    """Whether kernels of transformer-engine sort tokens by expert and restore their order."""
    shared_expert_overlap: bool = False
    """Whether shared experts are computed during the token exchange."""
    transformer_config: Config | None = field(default=None, hash=False)
    """Further fields of Megatron's ``TransformerConfig``, which no other key sets."""

    @property
    def padding_factor(self) -> float:
        """The number of tokens of an expert, with ``moe_pad_to_capacity``, as a multiple of the mean."""
        return self.capacity_factor or 1.0 if self.moe_pad_to_capacity else 1.0

    def gathers_during_forward(self, *, whole_updates: bool) -> bool:
        """Return whether updated weights are gathered during the next forward pass.

        This is ``overlap_param_gather``, or its default. ``whole_updates`` means that each full weight is
        updated by the rank that owns it, in place of Megatron's own optimizers.
        """
        if self.overlap_param_gather is not None:
            return self.overlap_param_gather
        can = self.distributed_optimizer and self.overlap_grad_reduce
        return can and not (whole_updates or self.optimizer_cpu_offload)

    def fuses_activation(self, device: DeviceKind) -> bool:
        """Return ``bias_activation_fusion``, or its default on a kind of device."""
        return device == "cuda" if self.bias_activation_fusion is None else self.bias_activation_fusion

    def groups_experts(self, model: PreTrainedModel, adapter: LoRA | None) -> bool:
        """Return whether the experts of a rank are computed together.

        This is ``moe_grouped_gemm``, or its default: true unless ``adapter`` targets experts.
        """
        if self.moe_grouped_gemm is not None:
            return self.moe_grouped_gemm
        return adapter is None or not adapter.expert_targets(model)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that process a micro-batch together: tp x pp x cp."""
        return self.tp * self.pp * self.cp
