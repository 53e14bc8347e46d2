"""Rank functions of test_float8.py, and the same step with torchao's layers in plain transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

from components.adapters import LoRA
from components.contracts.batch import IGNORE
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.fsdp_private import fsdp_modules
from components.models.experts import unstack_experts
from components.optimizers import Optimizer
from tests.distributed.any_to_any_cases import save
from tests.distributed.cases import Step, make_engine, next_token, plain_model, sequences, share, step
from tests.distributed.compile_cases import without_cpp
from tests.distributed.gradients import capture


def plain_step(model: Any, recipe: str, weights: dict[str, nn.Parameter] | None = None) -> Step:
    """Return a step of ``model`` with the linear layers of its blocks by torchao, one sequence at a time.

    Sums are divided at the end, as in the engine: gradients that are divided before are rounded differently.
    ``weights`` are those to compare, by default all.
    """
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: ".layers." in name and ".lora_" not in name
    )
    loss, count = 0.0, 0
    for row in sequences():
        logits = model(input_ids=row.ids[None], use_cache=False).logits[0]
        total = F.cross_entropy(logits, row.labels, ignore_index=IGNORE, reduction="sum")
        total.backward()
        loss, count = loss + total.item(), count + int((row.labels != IGNORE).sum())
    found = model.named_parameters() if weights is None else weights.items()
    stacked = ((name, p.grad / count) for name, p in found if p.grad is not None)
    grads = dict(unstack_experts(stacked))
    return Step(loss / count, torch.stack([g.norm() for g in grads.values()]).norm().item(), grads)


def plain(family: str, recipe: str) -> Step:
    """Return ``plain_step`` with the attention of the engine: its last bit decides how some values round."""
    return plain_step(plain_model(family, "sdpa"), recipe)


def engine_step(
    on: FSDP2, family: str, layout: str, micro_batch: int, adapter: LoRA | None = None, compiled: bool = False
) -> Step:
    """Return one step of the engine, in fp32 except for its products in float8."""
    engine = make_engine(family, on=on, float8=True, adapter=adapter, compiled=compiled)
    grads = capture(engine)
    result = step(engine, share(engine, layout, micro_batch), next_token())
    engine.close()
    return Step(result.loss, result.grad_norm, grads)


def compiled_step(on: FSDP2, family: str) -> Step:
    with without_cpp():
        return engine_step(on, family, "packed", 1, compiled=True)


def engine_steps(layouts: Sequence[FSDP2], family: str) -> list[Step]:
    return [engine_step(on, family, "packed", 1) for on in layouts]


def curve(on: FSDP2, optimizer: Optimizer) -> list[float]:
    """Return the losses of three steps and of an evaluation after each of them."""
    engine, loss, found = make_engine(on=on, float8=True, optimizer=optimizer), next_token(), []
    for seed in range(3):
        batches = share(engine, "packed", 1, seed)
        found += [step(engine, batches, loss, 1e-2).loss, engine.evaluate([batches], loss)["loss"]]
    engine.close()
    return found


def continued_in_bf16(on: FSDP2, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Return all tensors after three steps, the same with a resume after two, and ``gathers_right``."""
    loss, found = next_token(), []
    for resumes in (False, True):
        engine = make_engine(on=on, float8=True, dtype=torch.bfloat16)
        for seed in range(3):
            if resumes and seed == 2:
                engine.close()
                engine = make_engine(on=on, float8=True, dtype=torch.bfloat16)
                engine.load(folder)
            step(engine, share(engine, "packed", 1, seed), loss, 1e-2)
            if not resumes and seed == 1:
                save(engine, folder)
        found.append({key: plain_tensor(value) for key, value in engine.tensors().items()})
        right = gathers_right(engine)
        engine.close()
    return found[0], found[1], right


def plain_tensor(tensor: Any) -> Tensor:
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    assert type(shard) is Tensor, "a checkpoint has only tensors of torch"
    return shard.clone()


def gathers_right(engine: Any) -> bool:
    """Return whether all gathered weights are those that torchao rounds from the whole fp32 weights."""
    linears = [module for module in engine.scorer.modules() if isinstance(module, Float8Linear)]
    whole = {}
    for member in engine.members:
        tensor = member.slices(member.parameter.detach())
        whole[member.name] = tensor.full_tensor()
    names = {id(module): name for name, module in engine.scorer.lm.named_modules()}
    assert all(one.weight._local_tensor._precomputed_scale is not None for one in linears)
    for module in fsdp_modules(engine.scorer):
        module.unshard()
    emulated = ScaledMMConfig(True, True)
    right = []
    for linear in linears:
        expected = hp_tensor_to_float8_dynamic(
            whole[f"{names[id(linear)]}.weight"], torch.float8_e4m3fn, LinearMMConfig(*[emulated] * 3)
        )
        right.append(torch.equal(linear.weight._scale, expected._scale))
        right.append(torch.equal(linear.weight._data.float(), expected._data.float()))
    for module in fsdp_modules(engine.scorer):
        module.reshard()
    return len(right) == 2 * 7 * 2 and all(right)
