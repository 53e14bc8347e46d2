"""Rank function of test_mesh_groups.py: the process groups that an engine creates."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.grouped_experts import grouped_experts
from components.engines.megatron import Megatron
from tests.distributed.cases import make_engine


def engine_groups(on: FSDP2 | Megatron) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return this rank's groups of more than one rank by dimension, and the mesh in ``describe``."""
    engine = make_engine("qwen3" if on.ep == 1 else "qwen3_moe", on=on)
    found = fsdp2_groups(engine) if isinstance(engine, FSDP2Engine) else megatron_groups(on)
    mesh = engine.describe()["mesh"]
    dist.barrier()  # destroying groups breaks the connections of a rank that is still creating them
    engine.close()
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}, mesh


def fsdp2_groups(engine: FSDP2Engine) -> dict[str, list[int]]:
    names = engine.mesh.mesh_dim_names or ()
    found = {name: dist.get_process_group_ranks(engine.mesh.get_group(name)) for name in names}
    if len(found["cp"]) > 1:
        mesh = next(iter(engine.weights.values())).device_mesh  # type: ignore[attr-defined]
        found["dp_shard x cp"] = dist.get_process_group_ranks(mesh.get_group("dp_shard"))
    for experts in grouped_experts(engine.scorer.lm).values():
        assert experts.ep is not None
        found["ep"] = dist.get_process_group_ranks(experts.ep)
        mesh = next(w for name, w in engine.weights.items() if ".experts." in name).device_mesh  # type: ignore[attr-defined]
        found["dp_shard of experts"] = dist.get_process_group_ranks(mesh.get_group("dp_shard"))
    return found


def megatron_groups(on: Any) -> dict[str, list[int]]:
    from megatron.core import parallel_state

    found = {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }
    if found["cp"].size() > 1:
        found["dp x cp"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if on.ep > 1:
        found["ep"] = parallel_state.get_expert_model_parallel_group()
        found["etp"] = parallel_state.get_expert_tensor_parallel_group()
        found["dp of experts"] = parallel_state.get_expert_data_parallel_group()
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}


def groups_of_all(layouts: Sequence[FSDP2 | Megatron]) -> list[Any]:
    """Return ``engine_groups`` of one layout after another."""
    return [engine_groups(on) for on in layouts]
