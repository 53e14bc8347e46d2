"""Checks in the parent process, before ranks are spawned."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from components.adapters.target_modules import matches
from components.checkpoint import read_meta
from components.contracts.configs import AdapterConfig, ModelConfig
from components.contracts.errors import CompletedError, ConfigError
from components.contracts.hook import Hook
from components.contracts.parallelism import ParallelismSpec
from components.engines.megatron import Megatron
from components.models import ModelSpec
from components.models.attention_shape import attention_shape
from components.models.scalar_head import has_scalar_head, output_head, ties_embedding
from components.optimizers.muon import HEADS, Muon
from components.preflight.engine_layouts import EngineLayout
from components.yaml_text import parse_yaml

log = logging.getLogger(__name__)

FIRST_LENGTH = "original_max_position_embeddings"
"""Config key of longrope: the length up to which all sequences have the same frequencies."""


def check_modes(
    mode: str,
    devices: int | None,
    device_name: str | None,
    device: str,
    *,
    joined: bool,
    evaluates: bool = False,
) -> None:
    """Raise ConfigError if ``preflight.mode`` does not fit the device, its other keys or the launcher."""
    if devices is not None and mode != "plan":
        raise ConfigError(
            f"preflight.devices: is {devices}, which only preflight.mode=plan reads; set that, or leave it "
            "out (parallelism says how many ranks there are)."
        )
    if device_name is not None and mode in ("check", "prove"):
        raise ConfigError(
            f"preflight.device_name: is {device_name}, but this run uses the device of this machine; leave "
            "it out, or set preflight.mode=only, plan or rehearse."
        )
    if evaluates and mode in ("plan", "rehearse", "prove"):
        raise ConfigError(
            f"preflight.mode: is {mode}, which examines train steps, but run.evaluate_only takes none; use "
            "preflight.mode=only, or run.evaluate_only=false."
        )
    if mode == "prove" and device not in ("auto", "cpu"):
        raise ConfigError(
            f"run.device: is {device}, but preflight.mode=prove trains a small model on CPU ranks; use "
            "run.device=auto (if Megatron finds GPUs, with CUDA_VISIBLE_DEVICES= before the command)."
        )
    if mode == "rehearse" and device not in ("auto", "cuda"):
        raise ConfigError(
            f"run.device: is {device}, but preflight.mode=rehearse imitates a CUDA GPU, also on a machine "
            "without one; use run.device=auto."
        )
    if joined and mode != "check":
        raise ConfigError(
            f"preflight.mode: is {mode}, which needs no launcher, but one has started this rank; leave "
            "the launcher out, or use preflight.mode=check."
        )


def check_rehearsed_rank(rank: int | None, world_size: int) -> None:
    """Raise ConfigError if the layout has no rank with the number ``rank``. None is accepted."""
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"preflight.rank: is {rank}, and the layout has the ranks 0 to {world_size - 1}; name one of "
            "them, or leave it out for the one that needs the most memory."
        )


def check_forecast(mode: str, layout: ParallelismSpec, dtype: str) -> None:
    """Raise ConfigError if only a forecast or a rehearsal is wanted but the layout has none in ``dtype``."""
    if mode not in ("check", "prove") and not isinstance(layout, EngineLayout):
        raise ConfigError(
            f"preflight.mode: is {mode}, but only layouts of FSDP2 and Megatron have a forecast, and "
            f"parallelism is a {type(layout).__name__}; use preflight.mode=check, or another parallelism."
        )
    if mode in ("rehearse", "prove") and dtype == "fp8" and isinstance(layout, Megatron):
        raise ConfigError(
            f"preflight.mode: {mode} cannot call transformer-engine's float8 products, which need a real "
            "GPU; use run.dtype=bf16, or preflight.mode=only."
        )


def check_restarts(max_restarts: int, joined: bool) -> None:
    """Raise ConfigError if the runner is to restart ranks that another launcher has started."""
    if max_restarts and joined:
        raise ConfigError(
            f"run.max_restarts: is {max_restarts}, but a launcher has started these ranks; use its option "
            "(torchrun --max-restarts, on one node) with checkpoint.resume=auto, and run.max_restarts=0."
        )


def check_batch(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    """Raise ConfigError if data-parallel ranks cannot split the global batch into whole micro-batches."""
    unit = dp_size * micro_batch_size
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, next_batch(global_batch_size, unit)
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"run.global_batch_size: {global_batch_size} is not divisible by dp x run.micro_batch_size = "
            f"{dp_size} x {micro_batch_size}; use {near}."
        )


def next_batch(global_batch_size: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``global_batch_size``."""
    return -(-global_batch_size // unit) * unit


def check_model_fits_data(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int, sample_tokens: int
) -> None:
    """Raise ConfigError if sequences are too long for the model, or the tokenizer has too many tokens.

    Sequences and the final completion must fit the model's positions. With longrope, sequences must also fit
    the length up to which the frequencies do not depend on other sequences of the batch.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"data.max_length: {max_length} is over the model's {positions} positions "
            f"(max_position_embeddings); use data.max_length={positions} or less."
        )
    if positions is not None and sample_tokens > positions:
        raise ConfigError(
            f"run.final_sample_tokens: {sample_tokens} is over the model's {positions} positions "
            "(max_position_embeddings); use 40, or 0 for no completion."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_length > (first := rope[FIRST_LENGTH]):
        raise ConfigError(
            f"data.max_length: {max_length} is over {FIRST_LENGTH} = {first} of rope_type=longrope, which "
            "rotates every sequence of a batch by the longest of them, so that neighbours would change each "
            f"other; use data.max_length={first} or less."
        )
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"model.tokenizer: has {len(tokenizer)} tokens, the model's vocabulary only {config.vocab_size}; "
            f"use the tokenizer that belongs to the model, or a model with a larger vocab_size."
        )


def check_head_dim(optimizer: object, model: PreTrainedModel, *, adapted: bool) -> None:
    """Raise ConfigError if Muon's ``optimizer.head_dim`` is not the number of rows of a head of ``model``.

    None is accepted. If no trained matrix has heads, None is the only accepted value.
    """
    if not isinstance(optimizer, Muon) or optimizer.head_dim is None:
        return
    shape = attention_shape(model.config)
    named = any(
        name.endswith(HEADS) and weight.requires_grad and optimizer.orthogonalises(name, weight.ndim)
        for name, weight in model.named_parameters()
    )
    if adapted or shape.latent or not named:
        raise ConfigError(
            f"optimizer.head_dim: no trained matrix has heads as its rows ({', '.join(HEADS)}); use null."
        )
    if optimizer.head_dim != shape.key:
        raise ConfigError(
            f"optimizer.head_dim: is {optimizer.head_dim}, and a head of this model has {shape.key} rows; "
            f"use {shape.key}."
        )


def check_steps(steps: int, available: int) -> None:
    """Raise ConfigError if a proof or a rehearsal takes more ``steps`` than are ``available`` in the run."""
    if steps > available:
        raise ConfigError(
            f"preflight.steps: is {steps}, but the run has {available}; use preflight.steps={available}, or "
            "raise run.max_steps or run.epochs."
        )


def check_length(num_steps: int, resume: Path | None) -> None:
    """Raise CompletedError if the resumed run has completed and has no steps left."""
    done = steps_done(resume)
    if resume is not None and done >= num_steps:
        raise CompletedError(
            f"run.max_steps: {resume} has {done} steps already and the run ends at {num_steps}; "
            "raise run.max_steps or run.epochs, or take an earlier checkpoint.",
            resume.absolute().parent.parent,
        )


def check_stream(eval_every_epochs: int, save_every_epochs: int, reference: str) -> None:
    """Raise ConfigError if an option needs epochs or all samples, which a stream of data does not have."""
    in_steps = {"run.eval_every": eval_every_epochs, "checkpoint.save_every": save_every_epochs}
    for key, epochs in in_steps.items():
        if epochs:
            raise ConfigError(f"{key}_epochs: a stream of data has no epochs; use {key}.")
    if reference == "precomputed":
        raise ConfigError(
            "stage.reference: precomputed stores values for every sample before training, which a stream "
            "(data.streaming) does not allow; use stage.reference=frozen."
        )


def check_start(init_from: str | None, resume: Path | None) -> None:
    """Raise ConfigError if a resumed run names another ``init_from`` than the one that it began with."""
    if init_from is None or resume is None:
        return
    config = resume.absolute().parent.parent / "config.yaml"
    nodes = parse_yaml(config.read_text()) if config.is_file() else {}
    began = nodes.get("checkpoint", nodes.get("run", {})).get("init_from")  # before 0.2.0 it was a key of run
    if began != init_from:
        raise ConfigError(
            f"checkpoint.init_from: {resume} resumes with its own weights, and its run began with {began}; "
            "leave checkpoint.init_from out, or use checkpoint.resume=never."
        )


def check_profiled_steps(last_step: int, steps_left: int) -> None:
    """Raise ConfigError if the profiler has steps that the run does not have."""
    if last_step > steps_left:
        raise ConfigError(
            f"profiler.steps: the last is {last_step}, and this run takes {steps_left} steps; "
            "choose earlier ones, or raise run.max_steps or run.epochs."
        )


def check_profiled_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise ConfigError if the profiler has no ranks, or has ranks that the run does not have."""
    if not ranks:
        raise ConfigError("profiler.ranks: is empty, and nothing would be recorded; use [0].")
    if wrong := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise ConfigError(
            f"profiler.ranks: there is no rank {wrong[0]}; the run has {world_size}, use numbers from 0 on."
        )


def steps_done(resume: Path | None) -> int:
    """Return the number of completed steps in the checkpoint ``resume``. None means 0."""
    return 0 if resume is None else read_meta(resume).state["step"]


def check_shared_prompt(share_prompt: bool, layout: ParallelismSpec) -> None:
    """Raise ConfigError if the engine does not support shared prompts."""
    if share_prompt and not layout.computes_prefixes:
        raise ConfigError(
            f"data.share_prompt: is not supported by {type(layout).__name__}; use parallelism=fsdp2 or "
            "parallelism=single, or data.share_prompt=false."
        )


def check_random_numbers(alpha: float, dropout: float, share_prompt: bool) -> None:
    """Raise ConfigError if two answers would share the random numbers of their prompt.

    ``alpha`` is that of NEFTune, and ``dropout`` that of the adapter.
    """
    for key, value in (("model.neftune_alpha", alpha), ("adapter.dropout", dropout)):
        if value and share_prompt:
            raise ConfigError(
                f"{key}: two answers would share the random numbers of their prompt (data.share_prompt); use "
                f"data.share_prompt=false, or {key}=0."
            )


def check_mtp_stage(layers: int, kind: str) -> None:
    """Raise ConfigError if there are MTP ``layers`` and the ``kind`` of samples is neither text nor chat."""
    if layers and kind not in ("text", "chat"):
        raise ConfigError(
            f"model.mtp.num_layers: is {layers}, but this stage compares answers and predicts no next token; "
            "use 0, or stage=pt or sft."
        )


def check_generating_hooks(scalar_head: bool, hooks: Mapping[str, Hook]) -> None:
    """Raise ConfigError if a hook completes prompts with a model that has a scalar head."""
    for name, hook in hooks.items():
        if scalar_head and hook.generates_text:
            raise ConfigError(
                f"hook.{name}: a reward model has no head over the vocabulary, so it cannot complete "
                "prompts; leave the hook out."
            )


def check_normalisation(normalize: str | None, packing: str) -> None:
    """Raise ConfigError if the loss is a mean over sequences, but packing splits samples across rows."""
    if normalize == "sequence" and packing == "concat":
        raise ConfigError(
            "stage.normalize: is sequence, but data.packing=concat cuts samples across rows; "
            "use data.packing=bfd or stage.normalize=token."
        )


def warn_of_random_weights(model: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Warn if an adapter is trained on random weights, although the model's path has trained ones."""
    if adapter is not None and isinstance(model, ModelSpec) and model.path and model.init == "random":
        log.warning(
            "model.init=random: the frozen weights below the adapter are random; model.init=pretrained "
            "reads those of %s.",
            model.path,
        )


def warn_of_constant_reference(sync_every: int, num_steps: int) -> None:
    """Warn if the run ends before the reference is first mixed with the trained model."""
    if sync_every > num_steps:
        log.warning(
            "stage.sync_reference_every=%d: the run has %d steps, so the reference model is never updated.",
            sync_every,
            num_steps,
        )


def check_adapter(
    adapter: AdapterConfig | None, model: PreTrainedModel, bias_update_rate: float, adds_tokens: bool
) -> None:
    """Raise ConfigError if the adapter does not fit the model, or freezes what other options change."""
    if adapter is None:
        return
    if adds_tokens:
        check_added_rows(adapter, model)
    if bias_update_rate:
        raise ConfigError(
            f"model.moe.bias_update_rate: is {bias_update_rate}, but an adapter leaves the model's routers "
            "as they are; use model.moe.bias_update_rate=0, or adapter=none."
        )
    adapter.check(model)


def check_added_rows(adapter: AdapterConfig, model: PreTrainedModel) -> None:
    """Raise ConfigError unless the adapter trains the modules that hold the rows of added tokens."""
    if ties_embedding(model):
        raise ConfigError(
            "model.add_tokens: the rows of the new tokens are in an embedding that is tied to the head, "
            "which an adapter cannot train; use adapter=none, or model.add_tokens=false with a template that "
            "needs no new tokens, such as model.chat_template=plain."
        )
    holders = [model.get_input_embeddings(), *([] if has_scalar_head(model) else [output_head(model)])]
    names = [name for name, module in model.named_modules() if any(module is each for each in holders)]
    if not all(any(matches(name, word) for word in adapter.modules_to_save) for name in names):
        modules = ",".join(name.rpartition(".")[2] for name in names)
        raise ConfigError(
            "model.add_tokens: an adapter leaves the rows of the new tokens as they are; add "
            f"adapter.modules_to_save=[{modules}], or use adapter=none."
        )
