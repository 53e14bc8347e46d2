"""Rank functions of test_reference_passes.py."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.contracts.batch import IGNORE
from components.contracts.data import BatchShard
from components.contracts.engine import EngineOptions
from components.data.loader import PreparedData, SplitFiles, StoreFiles
from components.data.packing import PlanOptions
from components.data.plans import CachedPlans, count_steps
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models import ModelSpec
from components.optimizers import AdamW
from components.reference.precompute import precompute
from tests.distributed.cases import make_engine, next_token, plain_model, sequences, share, spec, step
from tests.pairs import PAIRS, make_pairs


def save_reference(path: Path) -> Path:
    """Save a llama model; the trained model is a qwen3."""
    model = plain_model("llama")
    assert isinstance(model, torch.nn.Module)
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def other_model(on: FSDP2 | Megatron, path: Path) -> dict[int, Tensor] | None:
    """Return reference log-probabilities after an update, by the first sequence of each micro-batch."""
    engine = on.build(
        spec("qwen3"),
        AdamW(lr=1e-2),
        EngineOptions(
            dtype=torch.float32,
            device="cpu",
            reference="frozen",
            reference_model=ModelSpec(path=str(path), init="pretrained"),
        ),
    )
    batches = share(engine, "packed", 2)
    step(engine, batches, next_token(), lr=1e-2)
    found, rank, size = engine.logps(batches, reference=True), engine.dp_rank, engine.dp_size
    engine.close()
    if found is None:
        return None
    return {2 * (rank + size * number): logps for number, logps in enumerate(found)}


def plain_logps(path: Path) -> list[Tensor]:
    """Return the log-probabilities of each sequence by transformers' model; 0 at positions without label."""
    model, found = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"), []
    for row in sequences():
        with torch.no_grad():
            logps = model(input_ids=row.ids[None]).logits[0].log_softmax(-1)
        chosen = logps.gather(1, row.labels.clamp(min=0)[:, None])[:, 0]
        found.append(torch.where(row.labels == IGNORE, 0.0, chosen))
    return found


def prepare(folder: Path) -> PreparedData:
    """Prepare pairs of random tokens in rows of at most forty tokens."""
    store = make_pairs(folder / "store")
    options, repeats = PlanOptions("bfd", 20, shuffle=False), np.ones(len(PAIRS))
    plans = CachedPlans(folder / "plans", store, options, repeats, share_prompt=False)
    plans.save_repeats()
    steps = count_steps(plans.rows(0), 4, drop_last=False)
    split = SplitFiles(
        (StoreFiles(str(store.path)),),
        str(plans.folder),
        options,
        share_prompt=False,
        num_steps=steps,
        drop_last=False,
    )
    return PreparedData(split, {}, "bfd", 0, 4, "identity", audit=None)  # type: ignore[arg-type]


def fill(on: FSDP2 | Megatron, data: PreparedData, folder: Path, family: str = "qwen3") -> None:
    engine = make_engine(family, on=on, reference="adapter_off")
    first = dist.get_rank() == 0
    scratch = folder / "scratch"
    precompute(
        engine, data, folder, scratch=scratch, micro_batch_size=1, writes=first, merges=first, beat=int
    )
    engine.close()


def fill_and_ask(on: FSDP2 | Megatron, data: PreparedData, folder: Path) -> tuple[float, float]:
    """Fill a cache and compare it, with one engine after another in the same processes, as in a run."""
    fill(on, data, folder)
    return difference(on, data, folder)


def difference(
    on: FSDP2 | Megatron, data: PreparedData, folder: Path, family: str = "qwen3"
) -> tuple[float, float]:
    """Compare the log-probabilities that the loader attaches with those of a frozen model.

    Return the largest difference and the largest absolute value.
    """
    engine = make_engine(family, on=on, reference="frozen")
    loader = data.loader(data.train, BatchShard(4, 1, engine.dp_rank, engine.dp_size), folder)
    errors, sizes = [0.0], [0.0]
    for number in range(loader.num_steps):
        batches = loader.microbatches(number)
        found = engine.logps(batches, reference=True) or []  # only the last stage has any
        for batch, logps in zip(batches, found):  # noqa: B905
            assert batch.ref_logps is not None
            errors.append((batch.ref_logps - logps).abs().max().item())
            sizes.append(logps.abs().max().item())
    engine.close()
    return max(errors), max(sizes)
