"""Preflight's sizes, FLOPs and times equal hand calculations."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.preflight.engine_layouts import comm_cost, mesh_info
from components.preflight.estimates.device_specs import Device, find_device, machine_memory, parse_size
from components.preflight.estimates.quantities import CommInputs, ModelSize
from components.preflight.estimates.step_time import (
    StepWork,
    bandwidth,
    comm_inputs,
    model_size,
    parameter_counts,
    step_time,
    step_work,
)
from components.preflight.search.candidate import Candidate
from components.preflight.search.layout_search import plan, search
from components.preflight.search.memory_advice import Variation, candidates, check_fits
from components.rank_info import MEMORY_SHARERS
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from tests.distributed.cases import fsdp2, megatron
from tests.e2e.commands import SMALL, composed

GIGA = 1e9
DEVICE = Device("test", "cuda", 2**30, True, 1e12, 0.5, link=100 * GIGA, network=10 * GIGA, per_node=8)
SIZE = ModelSize(parameters=1000, trained=800, layers=6, hidden=64, q_width=64, kv_width=32, kv_heads=4)
WORK = StepWork(
    SIZE, 4, 480, 400, 512, 512, flops=3e12, forward=1e12, modules={"core_attn": 1e11, "mlp": 6e11, "moe": 0}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of twelve documents of growing length and a file of one long document."""
    folder = tmp_path_factory.mktemp("data")
    texts = [f"one two three {n} " * (n + 1) for n in range(12)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "one.jsonl").write_text(json.dumps({"text": "".join(texts)}) + "\n")
    return folder


def case(folder: Path, *overrides: str, data: str = "text", small: Sequence[str] = SMALL) -> Candidate:
    here = [f"data.train={folder}/{data}.jsonl", f"data.cache_dir={folder}/cache", "data.num_workers=1"]
    keys = [*small, "stage=pt", "data=files", *here, f"run.output_dir={folder}/runs", "run.name=x"]
    found = check_launch(composed([*keys, *overrides]), ConfigSources(), ()).inspect().candidate
    assert found is not None
    return found


# ---- parameters

HIDDEN, INNER, LAYERS, QUERY, KEY, WORDS = 64, 96, 2, 4 * 16, 2 * 16, 8192
MATRICES = LAYERS * (2 * HIDDEN * QUERY + 2 * HIDDEN * KEY + 3 * HIDDEN * INNER)
VECTORS = LAYERS * (2 * HIDDEN + 2 * 16) + HIDDEN
"""The norms: two per block, those of queries and keys, and one at the end."""


def test_router_biases_are_trained_without_gradients(folder: Path) -> None:
    deepseek = case(folder, "model=deepseek_tiny", small=["data.max_length=128"])
    counts = parameter_counts(deepseek)
    assert counts["trainable"] == counts["total"]
    assert model_size(deepseek).all_trained


def test_parameters(folder: Path) -> None:
    total = MATRICES + VECTORS + WORDS * HIDDEN  # tied
    assert parameter_counts(case(folder)) == {"total": total, "trainable": total, "active": total}
    frozen = case(folder, "model.freeze=['model.embed_tokens.*']")
    assert parameter_counts(frozen)["trainable"] == MATRICES + VECTORS
    sides = LAYERS * (2 * (HIDDEN + QUERY) + 2 * (HIDDEN + KEY) + 3 * (HIDDEN + INNER))
    assert parameter_counts(case(folder, "adapter=lora", "adapter.r=4")) == {
        "total": total + 4 * sides,
        "trainable": 4 * sides,
        "active": total + 4 * sides,
    }
    size = model_size(case(folder, "adapter=qlora", "adapter.r=4"))
    assert (size.parameters, size.quantized) == (total + 4 * sides, MATRICES)
    assert 4.1 < 8 * size.quantized_bytes / MATRICES < 4.2


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_models_that_name_their_sizes_otherwise(kind: str, folder: Path) -> None:
    shape = "vocab_size: 8192, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
    ends = "bos_token_id: 0, eos_token_id: 0, pad_token_id: 0"
    overrides = ["~model.architecture", f"+model.architecture={{model_type: {kind}, {shape}, {ends}}}"]
    plain = [key for key in SMALL if not key.startswith("model.")]
    found = case(folder, *overrides, small=plain)
    assert found.peak.total > 16 * parameter_counts(found)["total"]


# ---- batches


def test_rows_that_are_cut(folder: Path) -> None:
    """Every token of one document, except the last, is an input with a label."""
    found = case(folder, "data.max_length=16", data="one")
    workload = found.microbatch
    assert (workload.rows, workload.length, workload.labels) == (2, 16, 32)
    assert workload.num_microbatches == 2
    work = step_work(found)
    assert (work.sequences, work.tokens, work.labels) == (4, 4 * 16, 4 * 16)


def test_padded_rows(folder: Path) -> None:
    found = case(folder, "data.packing=none", "run.max_steps=3", "run.micro_batch_size=4")
    audit = found.data.audit.train.sources[0]
    assert audit.samples == 12
    assert (found.microbatch.rows, found.microbatch.length) == (4, audit.length_max)
    assert found.microbatch.num_microbatches == 1
    work = step_work(found)  # the mean of an epoch: three steps of four
    assert work.sequences == pytest.approx(4)
    assert work.tokens == pytest.approx(audit.tokens / 3)
    assert work.labels == pytest.approx((audit.tokens - 12) / 3)
    steps = [step_work(found, step) for step in range(3)]
    longest = [found.data.train_loader(BatchShard(4, 4)).stats(step).seqlen_max for step in range(3)]
    assert [step.padded for step in steps] == [4 * length for length in longest]
    assert comm_inputs(found, work).tokens == pytest.approx(4 * sum(longest) / 3)


def test_an_epoch_that_is_shorter_than_a_step(folder: Path) -> None:
    """Eight ranks share its 12 rows, two in a micro-batch, so that no gradients are accumulated."""
    found = case(folder, "data.packing=none", "run.global_batch_size=64", "run.micro_batch_size=2")
    assert replace(found, layout=fsdp2(8), world_size=8).microbatch.num_microbatches == 1
    assert replace(found, layout=fsdp2(4), world_size=4).microbatch.num_microbatches == 2


def test_the_arithmetic_of_a_step(folder: Path) -> None:
    found = case(folder, "data.packing=none", "run.max_steps=3")
    work, loader = step_work(found), found.data.train_loader
    whole = BatchShard(global_batch_size=4, micro_batch_size=1)
    squares = sum(loader(whole).stats(step).sum_squared_seqlens for step in range(3)) / 3
    scores = 4 * QUERY * LAYERS * squares / 2  # causal: half of all pairs
    forward = 2 * MATRICES * work.tokens + 2 * WORDS * HIDDEN * work.labels + scores
    assert work.flops == pytest.approx(3 * forward)
    mlps = 2 * 3 * LAYERS * HIDDEN * INNER * work.tokens
    assert work.forward == pytest.approx(forward)
    assert work.modules == pytest.approx({"core_attn": scores, "mlp": mlps, "moe": 0})


# ---- communication of layouts


def sent(
    layout: FSDP2 | Megatron, world_size: int, *, size: ModelSize = SIZE, **keys: Any
) -> dict[str, float]:
    step = CommInputs(world_size, torch.bfloat16, 512.0, 3, **keys)
    volumes = comm_cost(layout, size, step).volumes
    total: Counter[str] = Counter()
    for volume in volumes:
        total[volume.dimension] += volume.num_bytes  # type: ignore[assignment]
    return dict(total)


def added_by_owners(layout: FSDP2 | Megatron, world_size: int) -> dict[str, float]:
    """Return the bytes that an optimizer of whole weights adds, by dimension."""
    plain, whole = sent(layout, world_size), sent(layout, world_size, whole_weights=True)
    return {name: added for name in whole if (added := whole[name] - plain.get(name, 0.0))}


def test_what_owners_of_whole_weights_send() -> None:
    # Gradients and values are gathered over shards, then over tp; the result is broadcast to all of them.
    assert added_by_owners(fsdp2(4), 4) == {"dp_shard": 2 * 0.75 * 800 * 4 + 0.75 * 800 * 4}
    both = added_by_owners(fsdp2(2, tp=2), 4)
    assert both == {"dp_shard": 2 * 0.5 * 400 * 4, "tp": 2 * 0.5 * 800 * 4, "all": 0.75 * 800 * 4}
    # Megatron's owners gather the gradients of their weights, and send the weights in bf16.
    assert added_by_owners(megatron(tp=2, pp=2), 4) == {"tp": 0.5 * 400 * (4 + 2)}
    assert added_by_owners(megatron(dp=4), 4) == {}
    divided = added_by_owners(megatron(tp=2, dp=2, distributed_optimizer=True), 4)
    # All gradients are summed on all ranks; the reduce-scatter and the all-gather of AdamW are gone.
    summed, adamw = 0.5 * 400 * 4 * 2, 0.5 * 400 * 4 + 0.5 * 400 * 2
    assert divided == {"dp": summed - adamw + 0.5 * 400 * 2, "tp": 0.5 * 800 * (4 + 2) / 2}


def test_what_fsdp2_sends() -> None:
    gathers, scatter = 3 * 2 * 0.75 * 1000 * 2, 0.75 * 800 * 4
    assert sent(fsdp2(4), 4) == {"dp_shard": gathers + scatter}
    kept = replace(fsdp2(4), reshard_after_forward=False)
    assert sent(kept, 4) == {"dp_shard": 0.75 * 1000 * 2 + scatter}  # once for all micro-batches
    coarse = replace(SIZE, trained=10, quantized=600, quantized_bytes=310)
    few = 3 * 2 * 0.75 * (400 * 2 + 310)
    assert sent(fsdp2(4), 4, size=coarse) == {"dp_shard": few + 0.75 * 10 * 4}
    offloaded = sent(fsdp2(4, cpu_offload=True), 4, size=coarse)
    assert offloaded["host"] == (3 * 2 * (400 * 2 + 310) + 10 * 4) / 4
    hybrid = sent(fsdp2(4, dp_replicate=2), 4)
    assert hybrid == {
        "dp_shard": 3 * 2 * 0.5 * 1000 * 2 + 0.5 * 800 * 4,
        "dp_replicate": 2 * 0.5 * 400 * 4,
    }
    often = sent(fsdp2(4, dp_replicate=2, reduce_gradients="every"), 4)
    assert often == {
        "dp_shard": 3 * 2 * 0.5 * 1000 * 2 + 3 * 0.5 * 800 * 4,
        "dp_replicate": 3 * 2 * 0.5 * 400 * 4,
    }
    # A block has four all-reduces, each of which sends 2 (p - 1) / p times its input, and recomputes one. The
    # embedding has one in the forward pass; a part of the model is frozen, and the head's is not needed.
    assert sent(fsdp2(1, tp=4), 4)["tp"] == (6 * 8 + 2) * 0.75 * 512 * 64 * 2
    full = sent(fsdp2(1, tp=4, activation_checkpointing="full"), 4)
    assert full["tp"] == (6 * 10 + 2) * 0.75 * 512 * 64 * 2
    # An MTP layer has an embedding and the all-reduces of its first matrix, which recomputation repeats.
    later = replace(SIZE, mtp_layers=1)
    assert sent(fsdp2(1, tp=4), 4, size=later)["tp"] == (6 * 8 + 2 + 2 + 4) * 0.75 * 512 * 64 * 2
    assert sent(megatron(tp=2), 2, size=later)["tp"] == (6 * 8 + 2 + 2 + 5) * 0.5 * 512 * 64 * 2
    # A recomputed MLP ends before its all-reduce.
    again = fsdp2(1, tp=4, activation_checkpointing="selective", recompute_modules=("mlp",))
    assert sent(again, 4)["tp"] == sent(fsdp2(1, tp=4), 4)["tp"]
    # Queries, keys, values and outputs of a rank's positions are sent in the forward and backward pass.
    assert sent(fsdp2(1, cp=2), 2)["cp"] == 2 * 6 * 0.5 * 256 * (64 + 32 + 32 + 64) * 2


def test_what_megatron_sends() -> None:
    assert sent(megatron(dp=4), 4) == {"dp": 2 * 0.75 * 800 * 4}
    sharded = megatron(dp=4, distributed_optimizer=True)
    assert sent(sharded, 4) == {"dp": 0.75 * 800 * 4 + 0.75 * 800 * 2}
    # A stage between others sends hidden states and gradients. An end sends one of them, and the gradient of
    # the embedding, on two ranks.
    for shared, most in ((100, 2 * 512 * 64 * 2), (10**6, 512 * 64 * 2 + 10**6 * 4)):
        assert sent(megatron(pp=3), 3, size=replace(SIZE, shared_by_stages=shared))["pp"] == most
    piped = sent(megatron(tp=2, pp=3, vpp=2), 6)
    assert piped["tp"] == (2 * 8 + 2 / 3) * 0.5 * 512 * 64 * 2  # two layers per stage
    assert piped["pp"] == 2 * 2 * 512 * 64 * 2  # two chunks, activations and gradients
    assert piped["dp"] == 0
    # The last stage sends no hidden states of its last chunk, also in a pass without gradient, and the first
    # stage no gradients of its first chunk. Those between them have no embedding.
    ends = [
        sent(megatron(pp=3, vpp=2), 3, size=replace(SIZE, shared_by_stages=100), stage=n, forward_passes=1)
        for n in range(3)
    ]
    state = 512 * 64 * 2
    assert [found["pp"] for found in ends] == [5 * state + 100 * 4, 6 * state, 4 * state + 100 * 4]
    # A recomputed MLP has its all-reduce again.
    again = megatron(tp=2, dp=1, activation_checkpointing="selective", recompute_modules=("mlp",))
    assert sent(again, 2)["tp"] == (6 * 10 + 2) * 0.5 * 512 * 64 * 2
    # Keys and values of all other ranks' positions are received, and their gradients are sent back.
    assert sent(megatron(cp=2), 2)["cp"] == 2 * 6 * 0.5 * 2 * 512 * 32 * 2
    recomputed = megatron(cp=2, activation_checkpointing="selective")
    assert sent(recomputed, 2)["cp"] == 1.5 * sent(megatron(cp=2), 2)["cp"]
    traded = megatron(cp=2, cp_comm_type="a2a")
    assert sent(traded, 2)["cp"] == sent(fsdp2(1, cp=2), 2)["cp"]


def test_the_bubble_of_a_pipeline() -> None:
    step = CommInputs(4, torch.float32, tokens=8.0, num_microbatches=12)
    plain = comm_cost(megatron(pp=4), SIZE, step)
    assert plain.bubble == pytest.approx(3 / 15)
    chunked = comm_cost(megatron(pp=4, vpp=2), SIZE, step)
    assert chunked.bubble == pytest.approx(3 / 27)
    # Nine micro-batches are filled up to twelve, which are also sent.
    filled = comm_cost(megatron(pp=4, vpp=2), SIZE, replace(step, num_microbatches=9))
    assert filled.bubble == pytest.approx(1 - 18 / 27)
    assert filled.volumes[1].num_bytes == pytest.approx(chunked.volumes[1].num_bytes * 12 / 9)


def test_a_link_is_chosen_by_the_ranks_it_joins() -> None:
    dims = mesh_info(megatron(tp=4, pp=2, dp=4), 32)["dims"]
    assert bandwidth(DEVICE, dims, "tp") == DEVICE.link
    assert bandwidth(DEVICE, dims, "dp") == DEVICE.network
    assert bandwidth(DEVICE, mesh_info(fsdp2(2, tp=4), 8)["dims"], "dp_shard") == DEVICE.link


def timed(layout: FSDP2 | Megatron, folder: Path, world_size: int) -> Any:
    made = case(folder, "run.global_batch_size=16", "data.max_length=8", data="one")
    return step_time(replace(made, layout=layout, world_size=world_size, device=DEVICE), WORK)


def test_the_time_of_a_step(folder: Path) -> None:
    alone = timed(fsdp2(1), folder, 1)
    assert (alone.compute, alone.total) == pytest.approx((6.0, 6.0))
    assert timed(fsdp2(1, activation_checkpointing="full"), folder, 1).total == pytest.approx(8.0)
    assert timed(fsdp2(1, activation_checkpointing="selective"), folder, 1).total == pytest.approx(6.2)
    both: dict[str, Any] = {
        "activation_checkpointing": "selective",
        "recompute_modules": ("core_attn", "mlp"),
    }
    # FSDP2 does not compute the last of the three products of an MLP again.
    assert timed(fsdp2(1, **both), folder, 1).total == pytest.approx(6 + 0.2 + 1.2 * 2 / 3)
    assert timed(megatron(dp=1, **both), folder, 1).compute == pytest.approx(6 + 0.2 + 1.2)
    piped = timed(megatron(pp=2), folder, 2)  # eight micro-batches
    assert piped.compute == pytest.approx(3.0)
    assert piped.idle == pytest.approx(3.0 / 8, rel=1e-3)
    assert piped.total == piped.compute + piped.idle + piped.waiting


# ---- devices


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 gib", 3 * 2**29), ("512MiB", 2**29), ("80GB", 80 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "80GiBs", "-1GiB", "0GiB", "80KiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"preflight.device_memory: .* write 80GiB"):
        parse_size(text)


def test_a_named_gpu_has_its_peak_and_its_memory() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        named = find_device("cuda", "H100", None, local_ranks=1, dtype=dtype)
        assert (named.flops, named.memory) == (989e12, 80e9)
    assert find_device("cuda", "A100", "40GB", local_ranks=1, dtype=torch.bfloat16).memory == 40e9


def offered(found: Candidate) -> set[str]:
    """Return the overrides that are considered as remedies."""
    return {
        f"{key}={value}"
        for change in candidates(Variation(found, {}))
        for key, value in change.overrides.items()
    }


def test_no_remedy_is_one_that_is_refused(folder: Path) -> None:
    """A policy in 4 bits with a full reference, or heads of Muon with an adapter."""
    assert "adapter=lora" in offered(case(folder))
    assert "adapter=lora" not in offered(case(folder, "optimizer=muon", "optimizer.head_dim=16"))
    assert "adapter=lora" not in offered(case(folder, 'model.add_tokens=["<a>"]'))
    experts = partial(case, folder, "model=deepseek_tiny", small=["data.max_length=128"])
    assert "adapter=lora" not in offered(experts())
    assert "adapter=lora" in offered(experts("model.moe.bias_update_rate=0"))
    pairs = folder / "pairs.jsonl"
    row = {"prompt": "a b", "chosen": "one two three", "rejected": "two"}
    pairs.write_text("".join(json.dumps({**row, "prompt": f"a {n}"}) + "\n" for n in range(16)))
    on_pairs = ("stage=dpo", f"data.train={pairs}", "data=files")
    lora = ("adapter=lora", "adapter.r=4")
    assert "adapter.quantize=nf4" in offered(case(folder, *on_pairs, *lora, data="pairs"))
    for source in ("stage.reference=precomputed", "stage.reference=frozen"):
        assert "adapter.quantize=nf4" not in offered(case(folder, *on_pairs, *lora, source, data="pairs"))


def test_the_most_rows_that_fit(folder: Path) -> None:
    wide = case(folder, "run.global_batch_size=8", "run.micro_batch_size=auto", "data.packing=none")
    totals = {size: replace(wide, micro_batch_size=size).peak.total for size in (2, 4)}
    assert totals[2] < totals[4]
    for bytes_, most in ((totals[4], 4), (totals[4] - 1, 2), (1, 1), (2**60, 8)):
        for certain in (True, False):
            limited = replace(wide, device=replace(wide.device, memory=bytes_, certain=certain))
            assert limited.with_largest_microbatch().micro_batch_size == most


def test_a_plan_of_one_micro_batch_per_step(folder: Path) -> None:
    """Smaller micro-batches need more memory, because their gradients are accumulated."""
    found = replace(case(folder, "data.max_length=16", data="one"), device=DEVICE)
    two = replace(found, layout=fsdp2(2, activation_checkpointing="full"), world_size=2)
    totals = {size: replace(two, micro_batch_size=size).peak.total for size in two.micro_batches}
    assert totals[2] < totals[1]
    limited = replace(found, device=replace(DEVICE, memory=totals[2]))
    plans = [each.overrides for each in search(limited, step_work(limited), devices=2)]
    assert any({"parallelism=fsdp2", "parallelism.dp=2"} < set(plan) for plan in plans)


def test_a_plan_says_why_it_has_no_layout_of_an_engine(folder: Path) -> None:
    found = replace(case(folder, "run.compile=true", "data.max_length=16", data="one"), device=DEVICE)
    assert "none with parallelism=megatron: run.compile: " in plan(found, 2).lines["plan"]
    assert "none with" not in plan(replace(found, compiled=False), 2).lines["plan"]


def test_a_reference_is_not_checked_like_a_trained_model() -> None:
    """It may have fewer layers than are recomputed, and none of the weights of the optimizer's groups."""
    layout = ["parallelism.activation_checkpointing=full", "parallelism.recompute_num_layers=2"]
    groups = ["optimizer.groups=[{match: '*.lora_B.*', lr: 1e-3}]", "adapter=lora"]
    launch = check_launch(composed([*SMALL, *layout, *groups, "run.name=x"]), ConfigSources(), ())
    model = launch.experiment.model
    small = replace(model, architecture={**model.architecture, "num_hidden_layers": 1}).meta_model
    launch.check_layout(small, trains=False)
    for keys in (layout, groups[:1]):
        launch = check_launch(composed([*SMALL, *keys, "run.name=x"]), ConfigSources(), ())
        with pytest.raises(ConfigError):
            launch.check_layout(small)


def test_offloaded_state_must_fit_the_machine(folder: Path) -> None:
    """All ranks of a machine share its memory; those of other machines do not."""
    layout = fsdp2(8, cpu_offload=True)
    offloads = replace(case(folder, "run.global_batch_size=16"), layout=layout, world_size=8, device=DEVICE)
    (rank,) = offloads.memory
    needed = 8 * sum(rank.host.values())
    assert offloads.host_memory == needed > 0
    check_fits(replace(offloads, device=replace(DEVICE, host=needed)))
    little = replace(DEVICE, host=needed - 1)
    with pytest.raises(ConfigError, match=r"parallelism.cpu_offload: the 8 rank\(s\) .* fits on a rank"):
        check_fits(replace(offloads, device=little))
    assert replace(offloads, device=replace(little, per_node=4)).fits()


def test_ranks_and_jobs_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    one, four = (find_device("cpu", None, None, local_ranks=n, dtype=torch.float32) for n in (1, 4))
    assert not one.certain
    assert machine_memory() > one.memory > 4 * four.memory
    assert four.flops == pytest.approx(one.flops / 4)
    assert find_device("cpu", None, "1GiB", local_ranks=4, dtype=torch.float32).memory == 2**30
    whole = machine_memory()
    monkeypatch.setenv(MEMORY_SHARERS, "2")  # concurrent jobs of a sweep
    assert machine_memory() == whole // 2
