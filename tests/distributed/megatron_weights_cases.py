"""Rank functions of test_megatron_weights.py on four gloo ranks in any layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.contracts.engine import EngineOptions
from components.engines.megatron.config import Megatron
from components.engines.shared.process_group import init_process_group
from components.models import ModelSpec, WeightSource, export_folder, named_shapes

Sizes = tuple[int, int, int]
"""tp, pp and vpp. The remaining factor of the world size is data parallelism."""

IDS = torch.arange(2 * 24).reshape(2, 24) * 7 % 89


def spec_of(sizes: Sizes) -> Megatron:
    return Megatron(tp=sizes[0], pp=sizes[1], vpp=sizes[2], transformer_impl="local")


@contextmanager
def layout(sizes: Sizes) -> Iterator[Megatron]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from components.engines.megatron import runtime  # noqa: F401  patches megatron, so it comes first

    init_process_group("cpu")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes[0],
        pipeline_model_parallel_size=sizes[1],
        virtual_pipeline_model_parallel_size=sizes[2] if sizes[2] > 1 else None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(0)
    try:
        yield spec_of(sizes)
    finally:
        parallel_state.destroy_model_parallel()


@dataclass
class Model:
    """This rank's chunks and their parameters, which are all 7 until weights are loaded."""

    spec: ModelSpec
    chunks: list[Any]
    blocks: Any
    meshes: Any


def build(spec: ModelSpec, layout: Megatron) -> Model:
    from components.engines.megatron.runtime.hf_weights import TPMeshes, hf_slices
    from components.engines.megatron.runtime.model import build_chunks
    from components.engines.megatron.runtime.transformer_config import transformer_config

    hf = spec.config()
    config = transformer_config(hf, layout, EngineOptions(dtype=torch.float32, device="cpu"))
    chunks = build_chunks(hf, config)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(7)
    return Model(spec, chunks, hf_slices(chunks, named_shapes(spec.build(hf))), TPMeshes("cpu"))


def loaded(
    folder: Path, layout: Megatron, change: Callable[[WeightSource], WeightSource] | None = None
) -> Model:
    from components.engines.megatron.runtime.hf_weights import fill_parameters

    spec = ModelSpec(path=str(folder), init="pretrained")
    model, source = build(spec, layout), spec.weights(0)
    fill_parameters(model.blocks, change(source) if change else source)
    return model


# ---- logits


@torch.no_grad()
def logits(model: Model) -> Tensor:
    """Return the logits ``[B, T, V]`` of ``IDS``, computed stage by stage without a schedule.

    Ranks of all stages but the last return ``[B, T, 0]``.
    """
    from megatron.core import parallel_state

    from components.contracts.batch import Batch
    from components.engines.megatron.runtime.cp_sharding import shard_batch
    from components.engines.megatron.runtime.model import ForwardRequest

    batch = Batch(IDS, IDS, torch.arange(24).expand_as(IDS).contiguous(), torch.tensor([24, 24]).int())
    row = shard_batch(batch, cp=1, rank=0, multiple=1)
    stages, stage = parallel_state.get_pipeline_model_parallel_world_size(), None
    group = parallel_state.get_pipeline_model_parallel_group()
    vocabulary = model.spec.config().vocab_size
    hidden = torch.empty(24, 2, model.spec.config().hidden_size)
    for number in range(len(model.chunks) * stages):
        stage = number % stages
        if stage == parallel_state.get_pipeline_model_parallel_rank():
            chunk = model.chunks[number // stages].eval()
            chunk._postprocess = lambda hidden_states, **_: hidden_states
            chunk.set_input_tensor(None if number == 0 else [hidden])
            hidden = chunk(ForwardRequest(row))
        hidden = hidden.contiguous()
        dist.broadcast(hidden, group=group, group_src=stage)
    scores = torch.empty(24, 2, 0)
    if parallel_state.is_pipeline_last_stage():
        mine = hidden @ model.chunks[-1].head.T
        parts = [torch.empty_like(mine) for _ in range(model.meshes.dense.size())]
        dist.all_gather(parts, mine, group=model.meshes.dense.get_group())
        scores = torch.cat(parts, -1)[..., :vocabulary]
    return scores.transpose(0, 1)


def logits_of(sizes: Sizes, folders: dict[str, Path]) -> dict[str, Tensor]:
    """Return the logits of each model."""
    with layout(sizes) as spec:
        return {name: logits(loaded(folder, spec)) for name, folder in folders.items()}


def flipped_row(source: WeightSource) -> WeightSource:
    """Return weights in which row 0 of one q projection has the opposite sign."""

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        value = source(name).clone()
        if name == "model.layers.1.self_attn.q_proj.weight":
            value[0] = -value[0]
        return value[index]

    return read


def logits_of_a_flipped_row(sizes: Sizes, folder: Path) -> Tensor:
    with layout(sizes) as spec:
        return logits(loaded(folder, spec, flipped_row))


# ---- the parameters of a rank


def exported(sizes: Sizes, folders: dict[str, Path], target: Path) -> None:
    from components.engines.megatron.runtime.hf_weights import full_hf_tensors

    with layout(sizes) as spec:
        for name, folder in folders.items():
            model = loaded(folder, spec)
            tensors = full_hf_tensors(model.blocks, model.meshes, lambda p: p)
            export_folder(model.spec, tensors, target / name, torch.float32)


@dataclass(frozen=True)
class Holdings:
    stage: int
    asked: dict[str, int]
    """Number of elements read from the source by name."""
    padding: list[float]
    """Values of the rows that pad the vocabulary of the Hugging Face model."""
    secondary: list[str]


def holdings(sizes: Sizes, folder: Path) -> Holdings:
    from megatron.core import parallel_state

    asked: dict[str, int] = {}

    def noted(source: WeightSource) -> WeightSource:
        def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            part = source(name, index)
            asked[name] = asked.get(name, 0) + part.numel()
            return part

        return read

    with layout(sizes) as spec:
        model = loaded(folder, spec, noted)
        padding, secondary = [], []
        for parameter, members in model.blocks.items():
            secondary += [b.name for b in members if not b.primary]
            if members[0].name in ("model.embed_tokens.weight", "lm_head.weight"):
                padding += parameter[members[0].stop :].flatten().tolist()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return Holdings(stage, asked, padding, secondary)


def refusals(folder: Path, changes: dict[str, dict[str, tuple[int, ...] | None]]) -> dict[str, str]:
    """Return the errors of ``hf_slices`` if the Hugging Face model has other shapes or lacks parameters.

    None as a shape means that the parameter is missing.
    """
    from components.engines.megatron.runtime.hf_weights import hf_slices

    with layout((2, 1, 1)) as parallelism:
        model = build(ModelSpec(path=str(folder), init="pretrained"), parallelism)
        shapes = named_shapes(model.spec.build(model.spec.config()))
        answers = {}
        for label, change in changes.items():
            changed = shapes | {name: torch.Size(shape or ()) for name, shape in change.items()}
            lacking = [name for name, shape in change.items() if shape is None]
            try:
                hf_slices(model.chunks, {name: s for name, s in changed.items() if name not in lacking})
            except AssertionError as error:
                answers[label] = str(error)
        return answers


def refusals_of_other_parameters(folder: Path) -> dict[str, str]:
    """Return the errors of ``hf_slices`` if the parts that Megatron names do not make up its parameters."""
    from components.engines.megatron.runtime import hf_weights

    found = {}
    with layout((2, 1, 1)) as parallelism:
        model = build(ModelSpec(path=str(folder), init="pretrained"), parallelism)
        shapes = named_shapes(model.spec.build(model.spec.config()))

        def refused(label: str, chunks: list[Any]) -> None:
            try:
                hf_weights.hf_slices(chunks, shapes)
            except AssertionError as error:
                found[label] = str(error)

        refused("twice", model.chunks * 2)
        hidden = model.chunks[0].sharded_state_dict
        for label, change in {"unnamed": drop_norm, "overlap": overlapping, "gap": half_of}.items():
            model.chunks[0].sharded_state_dict = lambda metadata, change=change: change(
                hidden(metadata=metadata)
            )
            refused(label, model.chunks)
    return found


NORM, FC1 = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"


def drop_norm(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name != NORM}


def overlapping(tensors: dict[str, Any]) -> dict[str, Any]:
    """Map the rows of the gate projection to both the gate and the up projection."""
    build = tensors[FC1].build_fn

    def both_first(*args: Any) -> Any:
        gate, up = build(*args)
        up.data = gate.data
        return [gate, up]

    return tensors | {FC1: replace(tensors[FC1], build_fn=both_first)}


def half_of(tensors: dict[str, Any]) -> dict[str, Any]:
    build = tensors[FC1].build_fn
    return tensors | {FC1: replace(tensors[FC1], build_fn=lambda *args: build(*args)[:1])}
