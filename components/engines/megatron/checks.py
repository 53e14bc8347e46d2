"""Checks that the Megatron engine supports a run, before any rank starts and without importing megatron."""

import math

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from components.adapters import LoRA
from components.contracts.device import DeviceKind
from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError, check_at_least_one
from components.engines.megatron import hf_names
from components.engines.megatron.layout import Layout
from components.engines.megatron.moe_config import FAMILIES, check_moe, read_moe_config
from components.engines.megatron.pipeline_split import check_stages, chunk_layers, layers_of_chunks
from components.engines.megatron.te_install import has_packed_kernel, has_transformer_engine
from components.engines.shared.parallel_dims import check_cp, check_tp
from components.engines.shared.recomputation import check_modules, check_recomputed
from components.models.experts import EXPERT_PARAM, unstack_experts
from components.models.mtp import num_mtp_layers
from components.models.scalar_head import SCORE
from components.optimizers import SGD, AdamW, Optimizer, TorchClass, check_matches

COUNTS = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "default_dp",
    "bucket_size",
    "first_stage_layers",
    "last_stage_layers",
    "ep",
    "etp",
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", *FAMILIES)
COMPUTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Optional fields of a model configuration, with the only value that the engine supports."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Supported ``rope_type`` for ordinary attention; these types do not scale attention scores."""
LATENT_ROPE_TYPES = (*ROPE_TYPES, "yarn")
"""Supported ``rope_type`` for multi-head latent attention, in which yarn scales the scores."""


def check_keys(layout: Layout) -> None:
    """Check the keys of the layout against each other.

    Raises:
        ConfigError: if a key is out of range, or would be ignored because another is not set.
    """
    check_at_least_one("parallelism", layout, *COUNTS)
    if layout.capacity_factor is not None and not 0 < layout.capacity_factor < math.inf:
        raise ConfigError(
            f"parallelism.capacity_factor: must be above 0, got {layout.capacity_factor}; use 1.25, or null."
        )
    for key, needs in contradictions(layout).items():
        raise ConfigError(f"parallelism.{key}: is {getattr(layout, key)!r}, but {needs}.")


def contradictions(layout: Layout) -> dict[str, str]:
    """Return, for each key that contradicts another, an explanation and a remedy."""
    staged = "there is one pipeline stage; set parallelism.pp above 1, or leave it out"
    overlapping = "gradients are reduced at once; use parallelism.overlap_grad_reduce=true, or leave it out"
    gathered = "needs parallelism.distributed_optimizer=true and parallelism.overlap_grad_reduce=true"
    unlimited = "experts take all tokens; set parallelism.capacity_factor, or leave it out"
    gives_ends = layout.first_stage_layers is not None or layout.last_stage_layers is not None
    alone = layout.pp == 1
    found = {
        "vpp": (layout.vpp > 1 and alone, staged),
        "pipeline_layout": (layout.pipeline_layout is not None and alone, staged),
        "first_stage_layers": (layout.first_stage_layers is not None and alone, staged),
        "last_stage_layers": (layout.last_stage_layers is not None and alone, staged),
        "sequence_parallel": (
            layout.sequence_parallel and layout.tp == 1,
            "there is one tensor-parallel rank; set parallelism.tp above 1, or leave it out",
        ),
        "cp_comm_type": (
            layout.cp_comm_type != "all_gather" and layout.cp == 1,
            "no sequence is split; set parallelism.cp above 1, or leave it out",
        ),
        "bucket_size": (layout.bucket_size is not None and not layout.overlap_grad_reduce, overlapping),
        "moe_token_drop_policy": (
            layout.moe_token_drop_policy != "probs" and layout.capacity_factor is None,
            unlimited,
        ),
        "moe_pad_to_capacity": (layout.moe_pad_to_capacity and layout.capacity_factor is None, unlimited),
        "moe_permute_fusion": (
            layout.moe_permute_fusion and layout.moe_pad_to_capacity,
            "its kernels do not pad; leave it out, or use parallelism.moe_pad_to_capacity=false",
        ),
        "shared_expert_overlap": (
            layout.shared_expert_overlap and layout.moe_token_dispatcher != "alltoall",
            "Megatron overlaps them with parallelism.moe_token_dispatcher=alltoall only",
        ),
        "activation_offloading": (
            layout.activation_offloading and layout.shared_expert_overlap,
            "shared experts are computed on a stream of their own, which may reuse the memory of restored "
            "activations too early; leave it out, or use parallelism.shared_expert_overlap=false",
        ),
        "overlap_param_gather": (
            layout.overlap_param_gather and not (layout.distributed_optimizer and layout.overlap_grad_reduce),
            f"it {gathered}",
        ),
        "gradient_accumulation_fusion": (
            bool(layout.gradient_accumulation_fusion and layout.activation_offloading),
            "Megatron finds no main gradient through copies of saved tensors; leave it out, or use "
            "parallelism.activation_offloading=false",
        ),
    }
    return {key: needs for key, (lacking, needs) in found.items() if lacking} | (
        {"pipeline_layout": "first_stage_layers or last_stage_layers is set too; use one of the two ways"}
        if gives_ends and layout.pipeline_layout is not None
        else {}
    )


def check_run(
    layout: Layout,
    model: PreTrainedModel,
    optimizer: Optimizer,
    options: EngineOptions,
    *,
    world_size: int,
) -> None:
    """Check the layout against the rest of the run; ``model`` may be on the meta device.

    Raises:
        ConfigError: if Megatron or its engine here does not support the run or would compute it wrongly.
    """
    check_device(layout, options.device)
    check_optimizer(layout, optimizer, options.dtype)
    check_supported(model)
    check_tp(layout.tp, model.config)
    if layout.cp_comm_type == "a2a":
        check_cp(layout.cp, layout.tp, model.config, instead="parallelism.cp_comm_type=all_gather")
    check_moe(layout, model, world_size)
    check_stages(layout, model.config.num_hidden_layers)
    most = max(layers_of_chunks(layout, model.config.num_hidden_layers))
    check_recomputed(layout.activation_checkpointing, layout.recompute_num_layers, most)
    experts = read_moe_config(model.config)
    kinds = {"mlp"} if experts is None else {"moe" if routed else "mlp" for routed in experts.layers}
    check_modules(layout.activation_checkpointing, layout.recompute_modules, kinds)
    check_mtp(layout, model.config)
    check_frozen(model, stacked=layout.groups_experts(model, options.adapter))
    if optimizer.groups:
        together = tensors(layout, model, options.adapter)
        if updates_whole_weights(optimizer):  # query, key and value are separate weights
            together = [[name] for names in together for name in names]
        check_matches(optimizer.groups, together)
    if options.adapter is not None:
        check_lora(layout, options.adapter, model)
    reason = why_no_transformer_engine(model.config, layout, options.dtype, options.device, options.adapter)
    if layout.transformer_impl == "transformer_engine" and reason:
        raise ConfigError(
            f"parallelism.transformer_impl: is transformer_engine, but {reason}; use auto or local."
        )


def check_mtp(layout: Layout, config: PreTrainedConfig) -> None:
    """Check that the last pipeline stage can hold the MTP layers and the embedding that they need.

    Raises:
        ConfigError: if there are several stages, and the model ties embedding and head or the last chunk has
            no layer.
    """
    count = num_mtp_layers(config)
    if not count or layout.pp == 1:
        return
    if config.tie_word_embeddings:
        raise ConfigError(
            f"model.mtp.num_layers: is {count}, and this model ties embedding and head, which Megatron does "
            "not support across stages; use parallelism.pp=1 or model.architecture.tie_word_embeddings=false."
        )
    if "t" not in chunk_layers(layout, config.num_hidden_layers)[-1][-1]:
        raise ConfigError(
            f"parallelism.pipeline_layout: the last part of {layout.pipeline_layout!r} has no layer, but the "
            f"layers of model.mtp.num_layers={count} are built like the last layer there; use a t before L."
        )


def check_device(layout: Layout, device: DeviceKind) -> None:
    if device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "run.device: is cpu, but Megatron uses the GPU if one is visible; hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty), or use run.device=cuda."
        )
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"run.device: is {device}, and the Megatron engine runs on NVIDIA GPUs and on the CPU; use "
            "parallelism=fsdp2, or run.device=cpu."
        )
    if layout.moe_permute_fusion and (device == "cpu" or not has_transformer_engine()):
        raise ConfigError(
            "parallelism.moe_permute_fusion: needs a GPU and transformer-engine 2.1 or newer "
            "(pip install transformer-engine[pytorch]); leave it out."
        )
    if layout.optimizer_cpu_offload and device == "cpu":
        raise ConfigError(
            "parallelism.optimizer_cpu_offload: moves optimizer state from a GPU to the host, and this run "
            "is on the CPU; leave it out."
        )


def updates_whole_weights(optimizer: Optimizer) -> bool:
    """Return whether full weights are updated by the ranks that own them, not by Megatron's optimizers."""
    return not isinstance(optimizer, AdamW | SGD)


def check_optimizer(layout: Layout, optimizer: Optimizer, dtype: torch.dtype) -> None:
    if layout.optimizer_cpu_offload and not layout.distributed_optimizer:
        raise ConfigError(
            "parallelism.optimizer_cpu_offload: is part of Megatron's distributed optimizer; "
            "set parallelism.distributed_optimizer=true, or leave it out."
        )
    if layout.optimizer_cpu_offload and dtype == torch.float32:
        raise ConfigError(
            "parallelism.optimizer_cpu_offload: Megatron moves only the fp32 copies of bf16 or fp16 weights; "
            "use run.dtype=bf16, or leave it out."
        )
    if isinstance(optimizer, TorchClass):
        optimizer.check_divisible()
        if optimizer.has_eval_weights:
            raise ConfigError(
                f"optimizer._target_: {optimizer.name} has other weights for evaluations, and Megatron's "
                "ranks exchange weights in updates only; use parallelism=fsdp2."
            )
    if updates_whole_weights(optimizer):
        for key in ("overlap_param_gather", "optimizer_cpu_offload"):
            if getattr(layout, key):
                raise ConfigError(
                    f"parallelism.{key}: is an option of Megatron's own optimizers, and {optimizer.kind} "
                    "updates whole weights on their owners instead; leave it out."
                )
    if not isinstance(optimizer, SGD):
        return
    if layout.distributed_optimizer:
        raise ConfigError(
            "parallelism.distributed_optimizer: Megatron shards the state of Adam only; "
            "use optimizer=adamw, or parallelism.distributed_optimizer=false."
        )
    if optimizer.nesterov:
        raise ConfigError(
            "optimizer.nesterov: Megatron's SGD does not support it; use optimizer.nesterov=false or "
            "parallelism=fsdp2."
        )


def check_supported(model: PreTrainedModel) -> None:
    """Raise ConfigError unless this engine's version of the model was compared with that of transformers.

    A model that was not compared could train wrongly without an error.
    """
    config, kind = model.config, model.config.model_type
    instead = "use parallelism=fsdp2 or parallelism=single."
    # Compare the module, because a user's own code may also have the model type llama.
    if type(model).__module__ not in {f"transformers.models.{a}.modeling_{a}" for a in ARCHITECTURES}:
        raise ConfigError(
            f"model: {kind} ({type(model).__name__}) is not supported by the Megatron engine, which supports "
            f"{', '.join(ARCHITECTURES)}; {instead}"
        )
    for key, value in COMPUTED.items():
        if getattr(config, key, value) != value:
            raise ConfigError(
                f"model: {key}={getattr(config, key)} of {kind} is not supported by the Megatron engine, "
                f"which needs {value}; {instead}"
            )
    rope, types = config.rope_parameters, LATENT_ROPE_TYPES if has_latents(config) else ROPE_TYPES
    if rope["rope_type"] not in types:
        raise ConfigError(
            f"model: rope_type={rope['rope_type']} of {kind}: the Megatron engine computes "
            f"{', '.join(types)}; {instead}"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"model: partial_rotary_factor={rope['partial_rotary_factor']} of {kind}: the Megatron engine "
            f"rotates whole heads only; {instead}"
        )
    if names := hf_names.unknown(name for name, _ in model.named_parameters()):
        raise ConfigError(f"model: {names[0]} of {kind} is not supported by the Megatron engine; {instead}")


def has_latents(config: PreTrainedConfig) -> bool:
    """Return whether the model uses multi-head latent attention."""
    return getattr(config, "kv_lora_rank", None) is not None


def tensors(layout: Layout, model: PreTrainedModel, adapter: LoRA | None) -> list[list[str]]:
    """Return the names of the trained weights; those that Megatron keeps in one tensor are in one list."""
    if adapter is not None:
        return [[name] for name in adapter.shapes(model)]
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    names = [name for name, _ in unstack_experts(trained)]
    together = hf_names.fused(names, stacked=layout.groups_experts(model, adapter))
    fused = {name for group in together for name in group}
    return [*together, *([name] for name in names if name not in fused)]


def check_frozen(model: PreTrainedModel, *, stacked: bool) -> None:
    """Check that no fused tensor is frozen only in part, and that no frozen layer has a trained bias.

    ``stacked`` means that the experts of a layer are in the same tensors.

    Raises:
        ConfigError: if either is the case.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    parts = hf_names.fused(trained, stacked=stacked)
    for names in parts:
        frozen = [name for name in names if not trained[name]]
        if frozen and len(frozen) < len(names):
            left = [name for name in names if trained[name]]
            of_experts = stacked and EXPERT_PARAM.fullmatch(frozen[0])
            other = "set parallelism.moe_grouped_gemm=false" if of_experts else "use parallelism=fsdp2"
            raise ConfigError(
                f"model.freeze, model.train_only: {frozen[0]} is frozen and {left[0]} is not, but Megatron "
                f"keeps them in one tensor; freeze both or neither, or {other}."
            )
    for name, is_trained in trained.items():
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and is_trained and not trained[weight]:
            raise ConfigError(
                f"model.freeze, model.train_only: {weight} is frozen and {name} is not, but Megatron "
                "computes no gradient for the bias of a frozen layer; freeze both or neither, or use "
                "parallelism=fsdp2."
            )


def check_lora(layout: Layout, adapter: LoRA, model: PreTrainedModel) -> None:
    if adapter.dora:
        raise ConfigError(
            "adapter.dora: the Megatron engine does not support it; use adapter=lora, or parallelism=fsdp2."
        )
    if adapter.quantize:
        raise ConfigError(
            "adapter.quantize: Megatron multiplies with the matrices of its layers directly, so they cannot "
            "be in 4 bits; use adapter=lora, or parallelism=fsdp2."
        )
    if set(adapter.saved(model)) - {SCORE}:
        raise ConfigError(
            "adapter.modules_to_save: the Megatron engine trains only the adapter; leave it out, or use "
            "parallelism=fsdp2."
        )
    if layout.gradient_accumulation_fusion:
        raise ConfigError(
            "parallelism.gradient_accumulation_fusion: is true, but with an adapter Megatron computes no "
            "gradient of its own weights; leave it out, or use adapter=none."
        )
    if layout.moe_grouped_gemm and adapter.expert_targets(model):
        raise ConfigError(
            "parallelism.moe_grouped_gemm: is true, but adapter.target_modules has experts, whose adapters "
            "need separate layers; leave it out, or use adapter.target_modules=attention."
        )
    if layout.etp > 1 and adapter.expert_targets(model):
        raise ConfigError(
            f"parallelism.etp: {layout.etp} ranks would split the experts in adapter.target_modules; use "
            "parallelism.etp=1, or adapter.target_modules=attention."
        )


def uses_transformer_engine(
    config: PreTrainedConfig,
    layout: Layout,
    dtype: torch.dtype,
    device: DeviceKind,
    adapter: LoRA | None = None,
) -> bool:
    """Return whether layers are those of transformer-engine; ``check_run`` must have passed.

    With ``auto``, transformer-engine must also have a memory-efficient kernel for packed sequences.
    """
    if layout.transformer_impl == "local":
        return False
    if why_no_transformer_engine(config, layout, dtype, device, adapter) is not None:
        return False
    return layout.transformer_impl == "transformer_engine" or has_packed_kernel()


def why_no_transformer_engine(
    config: PreTrainedConfig,
    layout: Layout,
    dtype: torch.dtype,
    device: DeviceKind,
    adapter: LoRA | None = None,
) -> str | None:
    """Return the reason why transformer-engine cannot compute this run, or None if it can.

    Its attention kernels for packed sequences support only half precision. With context parallelism, they
    support none of the ``cp_comm_type`` of this engine.
    """
    window = getattr(config, "sliding_window", None)
    latent = f"the latent attention of {config.model_type} is computed by local only"
    reasons = {
        "this run is on the CPU": device == "cpu",
        "it is not installed (pip install transformer-engine[pytorch])": (not has_transformer_engine()),
        "its linear layers hold the norm before them, where an adapter needs its output": adapter is not None,
        "activations are offloaded (parallelism.activation_offloading)": layout.activation_offloading,
        "its attention to packed sequences has no fp32 (run.dtype=bf16 has)": dtype == torch.float32,
        f"its attention to packed sequences has no cp_comm_type={layout.cp_comm_type}": layout.cp > 1,
        "MTP layers (model.mtp.num_layers) are computed by local only": num_mtp_layers(config) > 0,
        f"this {config.model_type} has a sliding window, which is computed by local only": window is not None,
        latent: has_latents(config),
        f"experts of {config.model_type} are computed by local only": read_moe_config(config) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
