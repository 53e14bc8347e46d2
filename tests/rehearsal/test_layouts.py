"""The options of both engines on a GPU, as far as that can be seen without one.

These are the options that ``test_estimates`` does not rehearse, whose rehearsals pass the same ``check``;
``test_rehearsed_options`` checks that no option is left out.

A case fails if a CUDA branch mixes devices or dtypes, breaks a rule of a kernel, or lets the host wait inside
of a micro-batch. See `EXPECTED_WAITS` for what an algorithm cannot avoid.
"""

from pathlib import Path

import pytest

from tests.e2e.commands import SMALL
from tests.rehearsal.rehearsed import Rehearsed, rehearsed

LITTLE = [word for word in SMALL if not word.startswith("run.device")]
TINY_EXPERTS = ["model=moe_tiny", "data.max_length=128", "run.max_steps=4"]
TINY_DEEPSEEK = ["model=deepseek_tiny", "data.max_length=128", "run.max_steps=4"]
ROUTER_LOSSES = ["model.moe.aux_loss=global_batch", "model.moe.z_loss_coef=0.001"]
DPO_LOSSES = ["stage=dpo", "stage.loss=[sigmoid,bco_pair,sft]", "stage.loss_weights=[0.8,0.2,1.0]"]
OF_PAIRS = ["stage.label_smoothing=0.1", "stage.rpo_alpha=0.5", "stage.f_divergence=js_divergence"]
OF_TOKENS = [
    *("stage.label_smoothing=0.1", "stage.z_loss=0.001"),
    *("stage.token_accuracy=true", "stage.normalize=sequence"),
]
OF_WEIGHTS = [
    "optimizer.groups=[{match:'*.embed_tokens.*',lr:1e-5,weight_decay:0}]",
    'model.add_tokens=["<one>","<two>"]',
]
RANK_STABILIZED = ["adapter=lora", "adapter.rslora=true", "adapter.target_modules=attention"]
CENTERED = ["stage=rm", "stage.center_rewards_coefficient=0.01"]
LAST_BLOCK = "model.train_only=['*.layers.1.*']"
NADAM = ["optimizer=torch", "optimizer._target_=torch.optim.NAdam"]
IN_PART = ["parallelism.activation_checkpointing=full", "parallelism.recompute_num_layers=1"]
TWO_EACH = "run.global_batch_size=8"  # two micro-batches on each of two ranks
BF16 = ["run.dtype=bf16"]
TENSORWISE = ["run.dtype=fp8", "parallelism.fp8_recipe=tensorwise"]
GATHERED = ["parallelism=fsdp2", *TENSORWISE, "parallelism.fp8_all_gather=true"]

FSDP2 = {
    "fp32 nadam": ["parallelism=fsdp2", "run.dtype=fp32", *NADAM],
    "hsdp schedule_free": [
        *("parallelism=hsdp", "parallelism.dp_shard=2"),
        *("optimizer=schedule_free", "preflight.rank=3"),
    ],
    "cp2": ["parallelism=fsdp2_cp2", "stage=dpo", "model.neftune_alpha=5.0", "preflight.rank=1"],
    "tp2cp2": ["parallelism=fsdp2_tp2cp2", "preflight.rank=3"],
    "frozen beginning": [
        "parallelism=fsdp2",
        "model.architecture.tie_word_embeddings=false",
        "model.freeze=[model.embed_tokens.*,'*.layers.0.*']",
    ],
    "orpo": ["parallelism=fsdp2", "stage=orpo"],
    "rm adafactor": ["parallelism=fsdp2_tp2", *CENTERED, "optimizer=adafactor"],
    "cpo lion": ["parallelism=fsdp2", "stage=cpo", "optimizer=lion"],
    "simpo adamw_8bit": ["parallelism=fsdp2_cp2", "stage=simpo", "optimizer=adamw_8bit"],
    "several losses muon": ["parallelism=fsdp2_tp2", *DPO_LOSSES, "optimizer=muon", "preflight.rank=1"],
    "precomputed": ["parallelism=fsdp2", "stage=dpo", "stage.reference=precomputed"],
    "ld dpo": ["parallelism=single", "stage=dpo", "stage.ld_alpha=0.5", *OF_PAIRS],
    "shared prompt": ["parallelism=fsdp2", "stage=dpo", "data.share_prompt=true"],
    "offload": ["parallelism=fsdp2", "parallelism.cpu_offload=true"],
    "activation offloading": ["parallelism=fsdp2", "parallelism.activation_offloading=true", "stage=dpo"],
    "groups": [
        "parallelism=fsdp2",
        "parallelism.blocks_per_group=2",
        "parallelism.prefetch_groups=1",
        LAST_BLOCK,
    ],
    "sgd": ["parallelism=fsdp2", "optimizer=sgd", "run.log_num_zeros=true", *OF_TOKENS, *OF_WEIGHTS],
    "lora": ["parallelism=fsdp2_tp2", *RANK_STABILIZED, "adapter.dropout=0.1", "stage=dpo"],
    "pissa": ["parallelism=fsdp2", "adapter=lora", "adapter.init_lora_weights=pissa"],
    "dora": ["parallelism=fsdp2", "adapter=dora", "parallelism.reduce_gradients=every", TWO_EACH],
    "qlora": ["parallelism=fsdp2", "adapter=qlora", "stage=dpo"],
    "fp8": ["parallelism=single", "run.dtype=fp8", "parallelism.fp8_recipe=rowwise_with_gw_hp"],
    "fp8 gathered": [*GATHERED, "stage=dpo"],
    "router losses": [*TINY_EXPERTS, "parallelism=fsdp2_ep2", *ROUTER_LOSSES],
    "experts lora": [*TINY_EXPERTS, "parallelism=fsdp2", "adapter=lora"],
}
MEGATRON = {
    "tr-dpo": ["parallelism=pp2", "stage=dpo", "stage.sync_reference_every=1", "stage.wpo=true"],
    "neftune": ["parallelism=tp2", "parallelism.sequence_parallel=true", "model.neftune_alpha=5.0"],
    "pp2 last": ["parallelism=pp2", "stage=dpo", "preflight.rank=1"],
    "cp2": ["parallelism=cp2", "preflight.rank=1", "data.packing=none"],
    "tp2cp2 fp16": ["parallelism=tp2cp2", "stage=dpo", "run.dtype=fp16", "preflight.rank=3"],
    "tp2pp2dp2": ["parallelism=tp2pp2dp2", "preflight.rank=7"],
    "distributed optimizer": [
        "parallelism=megatron_dp2",
        "parallelism.distributed_optimizer=true",
        "parallelism.overlap_grad_reduce=true",
        "parallelism.overlap_param_gather=true",
        "parallelism.bucket_size=20000",
    ],
    "cpo adafactor": [
        "parallelism=megatron_dp2",
        "parallelism.overlap_grad_reduce=false",
        "stage=cpo",
        "optimizer=adafactor",
    ],
    "several losses muon": ["parallelism=tp2", *DPO_LOSSES, "optimizer=muon"],
    "rm lion": [
        "parallelism=pp2",
        "parallelism.pp=3",
        "parallelism.first_stage_layers=1",
        "parallelism.last_stage_layers=1",
        "model.architecture.num_hidden_layers=4",
        "parallelism.tp=2",
        *CENTERED,
        "optimizer=lion",
        "preflight.rank=4",
    ],
    "simpo adamw_8bit": [
        "parallelism=pp2vpp2",
        "parallelism.pipeline_layout=Et|tt|t|L",
        "model.architecture.num_hidden_layers=4",
        "stage=simpo",
        "optimizer=adamw_8bit",
        "preflight.rank=1",
    ],
    "further fields": [
        "parallelism=tp2",
        "parallelism.bias_activation_fusion=false",
        "parallelism.gradient_accumulation_fusion=false",
        "parallelism.transformer_config={glu_linear_offset:0.5}",
    ],
    "offload": [
        "parallelism=megatron_dp2",
        "parallelism.distributed_optimizer=true",
        "parallelism.optimizer_cpu_offload=true",
    ],
    "padded": ["parallelism=tp2", "data.packing=none", "stage=kto"],
    "recomputation in part": ["parallelism=pp2", *IN_PART, *NADAM],
    "orpo": ["parallelism=tp2", "stage=orpo", LAST_BLOCK],
    "precomputed": [
        "parallelism=pp2",
        "stage=dpo",
        "stage.reference=precomputed",
        "stage.ld_alpha=0.5",
        *OF_PAIRS,
    ],
    "activation offloading": [
        "parallelism=pp2",
        "parallelism.activation_offloading=true",
        "parallelism.activation_checkpointing=selective",
    ],
    "sgd": ["parallelism=tp2", "optimizer=sgd", "run.log_num_zeros=true", *OF_TOKENS, *OF_WEIGHTS],
    "lora": ["parallelism=tp2", *RANK_STABILIZED, "adapter.dropout=0.1", "stage=dpo"],
    "pissa": [
        "parallelism=tp2",
        "adapter=lora",
        "adapter.init_lora_weights=pissa",
        "adapter.pissa_niter=4",
        "stage=dpo",
    ],
    "pp2ep2": [*TINY_EXPERTS, "parallelism=pp2ep2", "preflight.rank=3"],
    "capacity by weight": [
        *TINY_EXPERTS,
        "parallelism=ep2",
        "parallelism.moe_token_dispatcher=allgather",
        "parallelism.capacity_factor=1.25",
    ],
    "capacity without padding": [*TINY_EXPERTS, "parallelism=ep2", "parallelism.capacity_factor=1.25"],
    "capacity by position": [
        *TINY_EXPERTS,
        "parallelism=ep2",
        "parallelism.capacity_factor=1.25",
        "parallelism.moe_token_drop_policy=position",
        "parallelism.moe_pad_to_capacity=true",
    ],
    "router losses": [
        *TINY_EXPERTS,
        "parallelism=ep2",
        "parallelism.moe_grouped_gemm=false",
        *ROUTER_LOSSES,
    ],
    "shared experts": [*TINY_DEEPSEEK, "parallelism=ep2", "parallelism.shared_expert_overlap=true"],
    "latent attention": [*TINY_DEEPSEEK, "parallelism=tp2", "parallelism.sequence_parallel=true"],
}

EXPECTED_WAITS = {
    "components/engines/fsdp2/grouped_experts.py": "numbers of tokens per expert are sizes of the all-to-all",
    "item at components/losses/kto.py": "KL is one number of a step, which the host adds up over the ranks",
    "_fully_shard/_fsdp_param_group.py": "with cpu_offload, gradients go to host memory",
    "megatron/core/transformer/moe/token_dispatcher.py": "numbers of tokens are sizes of the all-to-all",
    "megatron/core/transformer/moe/moe_utils.py": "tokens are selected by a mask",
}
"""Part of the line of a wait inside of a micro-batch -> why it is there."""


def overrides_of(chosen: list[str]) -> list[str]:
    model = [] if any(word.startswith("model=") for word in chosen) else LITTLE
    dtype = [] if any(word.startswith("run.dtype") for word in chosen) else BF16
    return [*model, *dtype, *chosen]


def unexpected(found: Rehearsed) -> list[str]:
    return [wait for wait in found.waits_inside() if not any(part in wait for part in EXPECTED_WAITS)]


@pytest.mark.parametrize("chosen", FSDP2.values(), ids=FSDP2)
def test_fsdp2(chosen: list[str], tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "preflight.steps=1", *overrides_of(chosen))
    check(found)
    if "parallelism.cpu_offload=true" in chosen:
        # A checkpoint holds the moments themselves: a resume would fill copies on the GPU in their place.
        assert [row for row in found.record["blocking_copies"] if row["moment"] == "save"] == []


@pytest.mark.parametrize("chosen", MEGATRON.values(), ids=MEGATRON)
def test_megatron(chosen: list[str], tmp_path: Path) -> None:
    check(rehearsed(tmp_path, "preflight.steps=1", *overrides_of(chosen)))


def check(found: Rehearsed) -> None:
    assert found.record["violations"] == []
    assert unexpected(found) == []
    assert not [row for row in found.record["blocking_copies"] if "loss_accumulator" in row["site"]]
    assert {"forward", "backward", "update"} <= found.record["kernels"].keys()
    assert found.peak > 0


def test_compiled_blocks_are_rehearsed_operator_by_operator(tmp_path: Path) -> None:
    """``run.compile`` changes nothing in a rehearsal, whose report lists it among its limits."""
    words = ["preflight.steps=1", *overrides_of(["parallelism=single"])]
    plain, compiled = (
        rehearsed(tmp_path / value, *words, f"run.compile={value}") for value in ("false", "true")
    )
    check(plain)
    assert compiled.record["kernels"] == plain.record["kernels"]
    assert compiled.record["memory"] == plain.record["memory"]


def test_deterministic_kernels_are_rehearsed(tmp_path: Path) -> None:
    """With them, Megatron's embedding is an indexing operator, which has another backward pass."""
    words = ["preflight.steps=1", *overrides_of(["parallelism=tp2"])]
    plain, other = (
        rehearsed(tmp_path / value, *words, f"run.deterministic={value}") for value in ("false", "true")
    )
    check(other)
    assert other.record["kernels"]["backward"] != plain.record["kernels"]["backward"]
