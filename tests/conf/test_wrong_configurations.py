"""Invalid layouts, batches and sizes are refused with the key and a value that would be valid."""

import re
from collections.abc import Mapping

import pytest

from tests.conf.conftest import Refused

BIG = ("model=llama3_70b", "preflight.mode=only", "preflight.device_name=H100", "run.dtype=bf16")
MANY = ("run.global_batch_size=64", "run.micro_batch_size=1")
UNTIED = "model.architecture.tie_word_embeddings=false"
ON = "parallelism="
FP8 = "run.dtype=fp8"
SELECTIVE = (ON + "fsdp2", "parallelism.activation_checkpointing=selective")
GATHERED = (FP8, ON + "fsdp2", "parallelism.fp8_recipe=tensorwise", "parallelism.fp8_all_gather=true")
TWELVE = ("run.global_batch_size=12", "run.micro_batch_size=1")

# id: (arguments, the key that the message begins with, words of the remedy)
WRONG: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    # ---- tensor parallelism
    "tp 5": (
        (ON + "tp2", "parallelism.tp=5"),
        "parallelism.tp: 5 does not divide num_key_value_heads = 4",
        "use 2 or 4",
    ),
    "tp 6 of FSDP2": (
        (ON + "fsdp2_tp2", "parallelism.tp=6", "run.global_batch_size=8"),
        "parallelism.tp: 6 does not divide num_key_value_heads = 4",
        "use 2 or 4",
    ),
    "tp 3 of 70B": ((*BIG, *MANY, ON + "megatron", "parallelism.tp=3"), "parallelism.tp: 3", "use 2 or 4"),
    "tp 16 of 70B": ((*BIG, *MANY, ON + "fsdp2", "parallelism.tp=16"), "parallelism.tp: 16", "use 4 or 8"),
    "tp of an odd MLP": (
        (ON + "fsdp2_tp2", "model.architecture.intermediate_size=767"),
        "parallelism.tp: 2 does not divide intermediate_size = 767",
        "use 1",
    ),
    "tp of a tiny vocabulary": (
        (*BIG, ON + "megatron", "parallelism.tp=4", "model=tiny", "model.architecture.vocab_size=3"),
        "parallelism.tp: 4",
        "use 1 or 2",
    ),
    "negative tp": ((ON + "tp2", "parallelism.tp=-2"), "parallelism.tp", "at least 1"),
    # ---- pipelines
    "pp 3": ((ON + "pp2", "parallelism.pp=3"), "parallelism.pp: 3", "use 2 or 4"),
    "pp 3 of 80 layers": (
        (*BIG, *MANY, ON + "megatron", "parallelism.pp=3"),
        "parallelism.pp: 3",
        "use 2 or 4",
    ),
    "pp 32 of 80 layers": (
        (*BIG, *MANY, ON + "megatron", "parallelism.pp=32"),
        "parallelism.pp: 32",
        "use 20 or 40",
    ),
    "vpp 3": ((ON + "pp2vpp2", "parallelism.vpp=3"), "parallelism.vpp: 3", "use 1 or 2"),
    "vpp 3 of 80 layers": (
        (*BIG, *MANY, ON + "megatron", "parallelism.pp=4", "parallelism.vpp=3"),
        "parallelism.vpp: 3",
        "use 2 or 4",
    ),
    "vpp of one stage": ((ON + "megatron", "parallelism.vpp=2"), "parallelism.vpp", "parallelism.pp above 1"),
    "vpp of pp 3": (
        (ON + "pp2vpp2", "parallelism.pp=3", "parallelism.vpp=2"),
        "parallelism.pp: 3",
        "use 1 or 2",
    ),
    "no end to a timeout": (("run.hang_timeout_s=inf",), "run.hang_timeout_s", "at least 0"),
    "an average in a folder of the run": (
        ("+hook.checkpoints._target_=components.hooks.EMA",),
        "hook.checkpoints",
        "rename it",
    ),
    "gradients added through copies": (
        (
            ON + "megatron",
            "parallelism.gradient_accumulation_fusion=true",
            "parallelism.activation_offloading=true",
        ),
        "parallelism.gradient_accumulation_fusion",
        "leave it out",
    ),
    "a group taken away": (("~adapter",), "adapter", "choose one"),
    "first stage with all": (
        (ON + "pp2", "parallelism.first_stage_layers=4"),
        "parallelism.first_stage_layers: first_stage_layers = 4 leaves 0 of 4",
        "leave a positive multiple of 1",
    ),
    "last stage with too many": (
        (ON + "pp2", "parallelism.last_stage_layers=9"),
        "parallelism.last_stage_layers",
        "leave a positive multiple of 1",
    ),
    "both ends with too few": (
        (ON + "pp2", "parallelism.first_stage_layers=1", "parallelism.last_stage_layers=1"),
        "parallelism.first_stage_layers",
        "leave none",
    ),
    "uneven chunks": (
        (ON + "pp2vpp2", "parallelism.first_stage_layers=1"),
        "parallelism.first_stage_layers",
        "use a multiple of 2",
    ),
    "first stage without stages": (
        (ON + "megatron", "parallelism.first_stage_layers=1"),
        "parallelism.first_stage_layers",
        "parallelism.pp above 1",
    ),
    "layout string without an end": (
        (ON + "pp2", "parallelism.pipeline_layout='Ett|tt'"),
        "parallelism.pipeline_layout",
        "end with L",
    ),
    "layout string with a layer too many": (
        (ON + "pp2", "parallelism.pipeline_layout='Ettt|ttL'"),
        "parallelism.pipeline_layout",
        "give 4",
    ),
    "layout string and stages": (
        (ON + "pp2", "parallelism.pipeline_layout='Ett|ttL'", "parallelism.first_stage_layers=2"),
        "parallelism.pipeline_layout",
        "use one of the two ways",
    ),
    # ---- context parallelism
    "cp 3": (
        (ON + "fsdp2_cp2", "parallelism.cp=3"),
        "parallelism.cp: 3 does not divide the 8 attention heads",
        "parallelism.cp=2 or 4",
    ),
    "cp 16": ((ON + "fsdp2_cp2", "parallelism.cp=16"), "parallelism.cp: 16", "parallelism.cp=4 or 8"),
    "cp 3 beside tp": (
        (ON + "fsdp2_tp2cp2", "parallelism.cp=3"),
        "parallelism.cp: 3 does not divide the 4 attention heads",
        "parallelism.cp=2 or 4",
    ),
    "cp 3 of Megatron's all-to-all": (
        (ON + "tp2cp2", "parallelism.cp=3", "parallelism.cp_comm_type=a2a"),
        "parallelism.cp: 3 does not divide the 4 attention heads",
        "all_gather",
    ),
    "cp 128 of 70B": (
        (*BIG, *MANY, ON + "fsdp2", "parallelism.cp=128"),
        "parallelism.cp: 128",
        "parallelism.cp=32 or 64",
    ),
    "all-to-all of no sequence": (
        (ON + "megatron", "parallelism.cp_comm_type=a2a"),
        "parallelism.cp_comm_type",
        "parallelism.cp above 1",
    ),
    # ---- data parallelism and batches
    "dp 3": ((ON + "fsdp2", "parallelism.dp=3"), "run.global_batch_size: 4", "use 6"),
    "dp 3 of Megatron": ((ON + "megatron", "parallelism.dp=3"), "run.global_batch_size: 4", "use 6"),
    "copies 3 of 4": (
        (ON + "hsdp", "parallelism.dp=4", "parallelism.dp_replicate=3"),
        "parallelism.dp_replicate: 3",
        "use 2 or 4",
    ),
    "copies 5 of 8": (
        (ON + "hsdp", "parallelism.dp=8", "parallelism.dp_replicate=5"),
        "parallelism.dp_replicate: 5",
        "use 2 or 4",
    ),
    "batch 10 on 4 ranks": (
        (ON + "fsdp2", "parallelism.dp=4", "run.global_batch_size=10"),
        "run.global_batch_size: 10",
        "use 8 or 16",
    ),
    "batch 1": (("run.global_batch_size=1",), "run.global_batch_size: 1", "use 2"),
    "micro-batch 3": (("run.micro_batch_size=3",), "run.global_batch_size: 4", "use 3 or 6"),
    "micro-batch automatic": (("run.micro_batch_size=automatic",), "run.micro_batch_size", "auto"),
    "micro-batch auto with a loss of the micro-batch": (
        ("model=moe_tiny", "model.moe.aux_loss=switch", "run.micro_batch_size=auto", "preflight.mode=only"),
        "run.micro_batch_size: is auto",
        "give a number",
    ),
    "micro-batch 0": (("run.micro_batch_size=0",), "run.micro_batch_size", "at least 1"),
    "batch of 512 ranks": (
        (*BIG, ON + "fsdp2", "parallelism.dp=512", "run.global_batch_size=4"),
        "run.global_batch_size: 4",
        "use 1024",
    ),
    "batch 1000 of 512 ranks": (
        (*BIG, ON + "fsdp2", "parallelism.dp=512", "run.global_batch_size=1000", "run.micro_batch_size=1"),
        "run.global_batch_size: 1000",
        "use 512 or 1024",
    ),
    "batch with a dropped rest": (
        ("run.global_batch_size=100000", "data.drop_last=true"),
        "run.global_batch_size: 100000",
        "lower it",
    ),
    # ---- models
    "heads 6 of 4": (
        ("model.architecture.num_attention_heads=6",),
        "model.architecture.num_attention_heads: 6",
        "choose a multiple",
    ),
    "key-value heads 3": (
        ("model.architecture.num_key_value_heads=3",),
        "model.architecture.num_attention_heads: 8",
        "choose a multiple",
    ),
    "positions": (("data.max_length=4097",), "data.max_length: 4097", "data.max_length=4096"),
    "experts": (
        ("model.architecture.model_type=qwen2_moe", "~model.architecture.head_dim"),
        "model: num_experts",
        "or a dense model",
    ),
    "more experts than there are": (
        ("model=moe_tiny", "model.architecture.num_experts_per_tok=9"),
        "model.architecture.num_experts_per_tok: is 9, but a token chooses among 8",
        "use 1 to 8",
    ),
    "more experts than in the groups": (
        ("model=deepseek_tiny", "model.architecture.num_experts_per_tok=5"),
        "model.architecture.num_experts_per_tok: is 5, but a token chooses among 4",
        "use 1 to 4",
    ),
    "groups that do not share out experts": (
        ("model=deepseek_tiny", "model.architecture.n_group=3"),
        "model.architecture.n_group: 3",
        "use a divisor of 8",
    ),
    "more groups than there are": (
        ("model=deepseek_tiny", "model.architecture.topk_group=5"),
        "model.architecture.topk_group: 5",
        "use one of them",
    ),
    "a coefficient in the wrong place": (
        ("model=moe_tiny", "+model.architecture.router_aux_loss_coef=0.1"),
        "model.architecture.router_aux_loss_coef",
        "use model.moe.aux_loss_coef",
    ),
    "a router trained whole": (
        ("model=moe_tiny", "adapter=lora", "adapter.modules_to_save=[model.layers.1.mlp.gate]"),
        "adapter.modules_to_save: model.layers.1.mlp.gate",
        "leave it out",
    ),
    # ---- values of a model that no run could be trained with
    "no hidden units": (
        ("model.architecture.hidden_size=0",),
        "model.architecture.hidden_size: is 0",
        "1 or more",
    ),
    "negative width": (
        ("model.architecture.hidden_size=-64",),
        "model.architecture.hidden_size: is -64",
        "1 or more",
    ),
    "no columns of the MLP": (
        ("model.architecture.intermediate_size=0",),
        "model.architecture.intermediate_size",
        "1 or more",
    ),
    "no layers": (
        ("model.architecture.num_hidden_layers=0",),
        "model.architecture.num_hidden_layers",
        "1 or more",
    ),
    "no heads": (
        ("model.architecture.num_attention_heads=0",),
        "model.architecture.num_attention_heads",
        "1 or more",
    ),
    "heads of no width": (("model.architecture.head_dim=0",), "model.architecture.head_dim", "1 or more"),
    "no words": (("model.architecture.vocab_size=0",), "model.architecture.vocab_size", "1 or more"),
    "no positions": (
        ("model.architecture.max_position_embeddings=0",),
        "model.architecture.max_position_embeddings",
        "1 or more",
    ),
    "latents of no width": (
        ("model=deepseek_tiny", "model.architecture.kv_lora_rank=0"),
        "model.architecture.kv_lora_rank",
        "1 or more",
    ),
    "initial weights that are no numbers": (
        ("model.architecture.initializer_range=nan",),
        "model.architecture.initializer_range: is nan",
        "finite",
    ),
    "initial weights with a negative spread": (
        ("model.architecture.initializer_range=-1.0",),
        "model.architecture.initializer_range",
        "0 or more",
    ),
    "dropout over 1": (
        ("+model.architecture.attention_dropout=2",),
        "model.architecture.attention_dropout: is 2",
        "below 1",
    ),
    "norm that is no number": (
        ("model.architecture.rms_norm_eps=nan",),
        "model.architecture.rms_norm_eps: is nan",
        "finite",
    ),
    "norm of a negative constant": (
        ("model.architecture.rms_norm_eps=-1.0",),
        "model.architecture.rms_norm_eps",
        "0 or more",
    ),
    "rope without a base": (
        ("model.architecture.rope_parameters.rope_theta=0",),
        "model.architecture.rope_parameters.rope_theta: is 0",
        "above 0",
    ),
    "rope of an infinite base": (
        ("model.architecture.rope_parameters.rope_theta=inf",),
        "model.architecture.rope_parameters.rope_theta",
        "finite",
    ),
    "padding outside of the vocabulary": (
        ("+model.architecture.pad_token_id=99999999",),
        "model.architecture.pad_token_id: is 99999999",
        "or null",
    ),
    "unknown activation": (
        ("model.architecture.hidden_act=banana",),
        "model.architecture.hidden_act: is banana",
        "correct it",
    ),
    "a size that overflows": (
        ("model.architecture.hidden_size=1000000000000000000",),
        "model.architecture.hidden_size",
        "correct it",
    ),
    "a field of GPT-2": (
        (
            "~model.architecture",
            "+model.architecture={model_type: gpt2, n_embd: 0, n_layer: 2, n_head: 2, vocab_size: 8192, "
            "bos_token_id: 0, eos_token_id: 0}",
        ),
        "model.architecture.n_embd: is 0",
        "1 or more",
    ),
    # ---- fields of a model that nothing reads
    "window without its switch": (
        ("+model.architecture.sliding_window=64",),
        "model.architecture.sliding_window",
        "use_sliding_window=true",
    ),
    "window of no layer": (
        ("+model.architecture.use_sliding_window=true",),
        "model.architecture.use_sliding_window",
        "max_window_layers",
    ),
    "cache in training": (
        ("+model.architecture.use_cache=true",),
        "model.architecture.use_cache",
        "leave it out",
    ),
    "dtype of the architecture": (
        ("+model.architecture.dtype=bfloat16",),
        "model.architecture.dtype",
        "use run.dtype",
    ),
    "code of a model of ours": (("model.trust_remote_code=true",), "model.trust_remote_code", "leave it out"),
    # ---- keys that need another
    "data of no evaluation": (
        ("data=files", "data.train=a.jsonl", "data.eval=b.jsonl", "run.eval_at_end=false"),
        "data.eval",
        "run.eval_at_end=true",
    ),
    "a split for no evaluation": (
        ("data=files", "data.train=hub:a", "data.eval_split=test", "run.eval_at_end=false"),
        "data.eval_split",
        "run.eval_at_end=true",
    ),
    "a limit of no evaluation data": (
        ("data=files", "data.train=a.jsonl", "data.max_eval_samples=9"),
        "data.max_eval_samples",
        "data.eval or data.eval_fraction",
    ),
    "profiler.steps of no profile": (("profiler.steps=[1,2]",), "profiler.steps", "profiler.enabled=true"),
    "profiler.ranks of no profile": (("profiler.ranks=[0]",), "profiler.ranks", "profiler.enabled=true"),
    "profiler.memory of no profile": (("profiler.memory=true",), "profiler.memory", "profiler.enabled=true"),
    "profiler.shapes of no profile": (("profiler.shapes=true",), "profiler.shapes", "profiler.enabled=true"),
    "profiler.stacks of no profile": (("profiler.stacks=true",), "profiler.stacks", "profiler.enabled=true"),
    "checksums of nothing": (("checkpoint.verify=true",), "checkpoint.verify", "checkpoint.resume"),
    "mismatch with nothing": (
        ("checkpoint.allow_mismatch=true",),
        "checkpoint.allow_mismatch",
        "checkpoint.resume",
    ),
    "patience with nothing": (
        ("early_stopping.patience=7",),
        "early_stopping.patience",
        "early_stopping.metric=eval/loss",
    ),
    "mode of no early stop": (
        ("early_stopping.mode=max",),
        "early_stopping.mode",
        "early_stopping.metric=eval/loss",
    ),
    "mode of no best checkpoint": (
        ("checkpoint.keep_best_mode=max",),
        "checkpoint.keep_best_mode",
        "checkpoint.keep_best=eval/loss",
    ),
    "default beside a size": (
        ("parallelism=megatron_dp2", "parallelism.default_dp=4"),
        "parallelism.default_dp",
        "parallelism.dp=null",
    ),
    "default beside shards": (
        ("parallelism=fsdp2", "parallelism.dp_shard=2", "parallelism.default_dp=4"),
        "parallelism.default_dp",
        "parallelism.dp=null",
    ),
    "folder of Hydra": (("hydra.run.dir=elsewhere",), "hydra.run.dir", "run.output_dir"),
    "working directory of Hydra": (("hydra.job.chdir=true",), "hydra.job.chdir", "run.output_dir"),
    "folders of jobs": (("hydra.sweep.subdir=a",), "hydra.sweep.subdir: nothing", "run.output_dir"),
    "launcher without a sweep": (("hydra/launcher=slurm",), "hydra/launcher=slurm", "add -m"),
    "option of a launcher": (
        ("hydra/launcher=local", "hydra.launcher.jobs=4"),
        "hydra/launcher=local: is read only in a sweep",
        "add -m",
    ),
    "option of the sweeper": (("+hydra.sweeper.n_trials=3",), "+hydra.sweeper.n_trials=3", "add -m"),
    "folder of no sweep": (("hydra.sweep.dir=/x",), "hydra.sweep.dir=/x", "add -m"),
    "long documents that are cut": (
        ("stage=pt", "data.long_samples=drop"),
        "data.long_samples",
        "data.packing=bfd",
    ),
    "a metric that no evaluation has": (
        ("early_stopping.metric=eval/banana", "run.eval_every=1"),
        "early_stopping.metric: evaluations do not report 'eval/banana'",
        "use one of eval/loss.",
    ),
    "a metric of another stage": (
        ("stage=kto", "checkpoint.keep_best=eval/nll", "run.eval_every=1"),
        "checkpoint.keep_best",
        "eval/rewards/chosen",
    ),
    # ---- keys that require another key
    "sequence parallelism alone": (
        (ON + "cp2", "parallelism.sequence_parallel=true"),
        "parallelism.sequence_parallel",
        "parallelism.tp above 1",
    ),
    "overlap without sharding": (
        (
            ON + "megatron_dp2",
            "parallelism.overlap_param_gather=true",
            "parallelism.overlap_grad_reduce=true",
        ),
        "parallelism.overlap_param_gather",
        "parallelism.distributed_optimizer=true",
    ),
    "offload without sharding": (
        (*BIG, *MANY, ON + "megatron", "parallelism.optimizer_cpu_offload=true"),
        "parallelism.optimizer_cpu_offload",
        "parallelism.distributed_optimizer=true",
    ),
    # ---- recomputed modules
    "modules without selective": (
        (ON + "fsdp2", "parallelism.recompute_modules=[mlp]"),
        "parallelism.recompute_modules: [mlp] is not read with activation_checkpointing=none",
        "activation_checkpointing=selective",
    ),
    "modules with full": (
        (ON + "megatron", "parallelism.activation_checkpointing=full", "parallelism.recompute_modules=[mlp]"),
        "parallelism.recompute_modules: [mlp] is not read with activation_checkpointing=full",
        "activation_checkpointing=selective",
    ),
    "an unknown module": (
        (*SELECTIVE, "parallelism.recompute_modules=[layernorm]"),
        "parallelism.recompute_modules",
        "'core_attn', 'mlp' or 'moe'",
    ),
    "a module twice": (
        (*SELECTIVE, "parallelism.recompute_modules=[mlp,mlp]"),
        "parallelism.recompute_modules: has a name twice",
        "use some of [core_attn,mlp]",
    ),
    "no module": (
        (*SELECTIVE, "parallelism.recompute_modules=[]"),
        "parallelism.recompute_modules: is empty",
        "null for [core_attn]",
    ),
    "experts of a dense model": (
        (*SELECTIVE, ON + "megatron", "parallelism.recompute_modules=[moe]"),
        "parallelism.recompute_modules: has moe",
        "use some of [core_attn,mlp]",
    ),
    "dense MLPs among experts": (
        (*SELECTIVE, "model=moe_tiny", "parallelism.recompute_modules=[core_attn,mlp]"),
        "parallelism.recompute_modules: has mlp",
        "use some of [core_attn,moe]",
    ),
    "MLPs that are not modules": (
        (
            *SELECTIVE,
            "parallelism.recompute_modules=[mlp]",
            "~model.architecture",
            "+model.architecture={model_type: opt, hidden_size: 64, ffn_dim: 128, num_hidden_layers: 2, "
            "num_attention_heads: 2, vocab_size: 8192, word_embed_proj_dim: 64}",
        ),
        "parallelism.recompute_modules: has mlp",
        "use some of [core_attn]",
    ),
    # ---- float8
    "fp8 on Megatron": ((ON + "tp2", FP8), "run.dtype: fp8", "parallelism=fsdp2"),
    "fp8 of Megatron rehearsed": (
        (ON + "tp2", FP8, "preflight.mode=rehearse"),
        "preflight.mode: rehearse",
        "preflight.mode=only",
    ),
    "fp8 with tp": ((ON + "fsdp2_tp2", FP8), "parallelism.tp", "parallelism.tp=1"),
    "fp8 with dora": ((FP8, "adapter=dora"), "adapter.dora", "run.dtype=bf16"),
    "fp8 in 4 bits": ((FP8, "adapter=qlora"), "adapter.quantize", "run.dtype=bf16"),
    "fp8 without a layer": (
        (FP8, *(f"model.architecture.{key}=40" for key in ("hidden_size", "intermediate_size", "head_dim"))),
        "run.dtype: fp8",
        "use bf16",
    ),
    "fp8 of an old GPU": (
        (FP8, "preflight.mode=only", "preflight.device_name=A100"),
        "run.dtype: fp8",
        "use run.dtype=bf16",
    ),
    "rows gathered": (
        (*GATHERED, "parallelism.fp8_recipe=rowwise"),
        "parallelism.fp8_all_gather",
        "tensorwise",
    ),
    "gathered from the host": (
        (*GATHERED, "parallelism.cpu_offload=true"),
        "parallelism.fp8_all_gather",
        "leave one out",
    ),
    "gathered in odd parts": (
        (*GATHERED, "parallelism.dp=3", "run.global_batch_size=6"),
        "parallelism.fp8_all_gather: 3 ranks",
        "leave it out",
    ),
    "a recipe of nothing": (
        ("parallelism.fp8_recipe=tensorwise",),
        "parallelism.fp8_recipe",
        "run.dtype=fp8",
    ),
    "dora on Megatron": ((ON + "tp2", "adapter=dora"), "adapter.dora", "adapter=lora"),
    "4 bits on Megatron": ((ON + "tp2", "adapter=qlora"), "adapter.quantize", "parallelism=fsdp2"),
    "4 bits with tp": ((ON + "fsdp2_tp2", "adapter=qlora"), "adapter.quantize", "parallelism.tp=1"),
    "saved modules on Megatron": (
        (ON + "tp2", "adapter=lora", "adapter.modules_to_save=[lm_head]", UNTIED),
        "adapter.modules_to_save",
        "parallelism=fsdp2",
    ),
    # ---- memory
    "small device": (
        ("preflight.device_memory=60MiB",),
        "preflight.device_memory: a rank needs",
        "What fits",
    ),
    "70B on one H100": (
        (*BIG, ON + "fsdp2", "parallelism.dp=1"),
        "preflight.device_memory",
        "parallelism.dp=",
    ),
    "70B on 8 of Megatron": (
        (*BIG, ON + "megatron", "parallelism.tp=8", "run.micro_batch_size=1"),
        "preflight.device_memory",
        "parallelism.",
    ),
    "8B for fine-tuning on a 4090": (
        ("model=llama3_8b", "preflight.mode=only", "preflight.device_name=RTX 4090", "run.dtype=bf16"),
        "preflight.device_memory",
        "parallelism.cpu_offload=true",
    ),
    "ranks that a machine cannot hold": (
        (ON + "fsdp2", "parallelism.dp=512", "run.global_batch_size=1024"),
        "parallelism.dp: this layout takes 512 ranks",
        "lower a size",
    ),
    "memory without a unit": (("preflight.device_memory='80'",), "preflight.device_memory", "write 80GiB"),
    "memory of another unit": (("preflight.device_memory=80Gb2",), "preflight.device_memory", "write 80GiB"),
    "memory 0": (("preflight.device_memory=0GiB",), "preflight.device_memory", "write 80GiB"),
    "memory as a number": (("preflight.device_memory=80",), "preflight.device_memory", "write 80GiB"),
    # ---- latent attention
    "heads of latents that share keys": (
        ("model=deepseek_tiny", "model.architecture.num_key_value_heads=4"),
        "model.architecture.num_key_value_heads: 4",
        "num_attention_heads = 8",
    ),
    "biases of latents on Megatron": (
        ("model=deepseek_tiny", "+model.architecture.attention_bias=true", ON + "megatron"),
        "model: attention_bias=True",
        "parallelism=fsdp2",
    ),
    # ---- multi-token prediction
    "negative layers": (("model.mtp.num_layers=-1",), "model.mtp.num_layers", "at least 0"),
    "no weight": (("model.mtp.num_layers=1", "model.mtp.loss_coef=0"), "model.mtp.loss_coef", "above 0"),
    "nothing to weigh": (("model.mtp.loss_coef=0.1",), "model.mtp.loss_coef", "model.mtp.num_layers=0"),
    "further tokens of pairs": (
        ("stage=dpo", "model.mtp.num_layers=1"),
        "model.mtp.num_layers",
        "stage=pt or sft",
    ),
    "further tokens of answers": (("stage=kto", "model.mtp.num_layers=1"), "model.mtp.num_layers", "use 0"),
    "further tokens of an adapter": (
        ("adapter=lora", "model.mtp.num_layers=1"),
        "model.mtp.num_layers",
        "use 0",
    ),
    "further tokens of GPT-2": (
        (
            "~model.architecture",
            "+model.architecture={model_type: gpt2, n_embd: 64, n_layer: 2, n_head: 2, vocab_size: 8192, "
            "bos_token_id: 0, eos_token_id: 0}",
            "model.mtp.num_layers=1",
        ),
        "model.mtp.num_layers: is 1, but gpt2",
        "qwen3",
    ),
    "tied stages": ((ON + "pp2", "model.mtp.num_layers=1"), "model.mtp.num_layers", "parallelism.pp=1"),
    "a last stage without a layer": (
        (ON + "pp2", UNTIED, "model.mtp.num_layers=1", "parallelism.pipeline_layout='Etttt|L'"),
        "parallelism.pipeline_layout",
        "use a t before L",
    ),
    # ---- experts on FSDP2
    "ep of a dense model": ((ON + "fsdp2", "parallelism.ep=2"), "parallelism.ep: 2", "model=moe_tiny"),
    "ep 3 of 4 ranks": (
        (ON + "fsdp2", "model=moe_tiny", "parallelism.dp=4", "parallelism.ep=3", *TWELVE),
        "parallelism.ep: 3",
        "use 2 or 4",
    ),
    "ep 3 of 8 experts": (
        (ON + "fsdp2", "model=moe_tiny", "parallelism.dp=6", "parallelism.ep=3", *TWELVE),
        "parallelism.ep: 3",
        "use 1 or 2",
    ),
    "tp of odd experts": (
        (ON + "fsdp2_tp2", "model=moe_tiny", "model.architecture.moe_intermediate_size=191"),
        "parallelism.tp: 2",
        "use 1",
    ),
    "experts that cannot be sharded": (
        (ON + "fsdp2", "model=moe_tiny", "parallelism.dp=3", *TWELVE),
        "parallelism.dp: 3",
        "use 2 or 4",
    ),
    "some experts frozen": (
        (ON + "fsdp2", "model=moe_tiny", "model.freeze=['*.experts.3.*']"),
        "model.freeze",
        "*.mlp.experts.*",
    ),
    "frozen routers whose biases move": (
        (ON + "fsdp2", "model=deepseek_tiny", "model.freeze=['*.mlp.gate.*']"),
        "model.moe.bias_update_rate",
        "model.moe.bias_update_rate=0",
    ),
    "trained layers without their biases": (
        (ON + "fsdp2", "model=deepseek_tiny", "model.train_only=['*.experts.*']"),
        "model.moe.bias_update_rate",
        "model.moe.bias_update_rate=0",
    ),
    "a field of Megatron that does not exist": (
        (ON + "tp2pp2", "parallelism.transformer_config={glu_linear_offse: 0.5}"),
        "parallelism.transformer_config.glu_linear_offse",
        "did you mean 'glu_linear_offset'?",
    ),
    # ---- preflight's own keys
    "mode": (("preflight.mode=dry",), "preflight.mode", "'only'"),
    "devices of a run": (("preflight.devices=8",), "preflight.devices", "preflight.mode=plan"),
    "very many devices": (
        ("preflight.mode=plan", "preflight.devices=100000000"),
        "preflight.devices: must be at most",
        "at most",
    ),
    "a completion of any length": (
        ("run.final_sample_tokens=100000000000",),
        "run.final_sample_tokens: 100000000000",
        "use 40",
    ),
    "a key of the layout in a search for layouts": (
        ("preflight.mode=plan", "preflight.devices=8", "parallelism=fsdp2", "parallelism.cpu_offload=true"),
        "parallelism.cpu_offload",
        "preflight.mode=plan searches for layouts",
    ),
    "a micro-batch size in a search for layouts": (
        ("preflight.mode=plan", "preflight.devices=8", "run.micro_batch_size=4"),
        "run.micro_batch_size",
        "preflight.mode=plan searches for layouts and micro-batch sizes",
    ),
    "the first rank without a rehearsal": (
        ("preflight.rank=0",),
        "preflight.rank",
        "preflight.mode=rehearse",
    ),
    "no devices": (("preflight.mode=plan", "preflight.devices=0"), "preflight.devices", "at least 1"),
    "device of a run": (("preflight.device_name=H100",), "preflight.device_name", "preflight.mode=only"),
    "device that is none": (
        ("preflight.mode=only", "preflight.device_name=H1000"),
        "preflight.device_name",
        "did you mean 'H100'",
    ),
    "a GPU that is a CPU": (
        ("preflight.mode=only", "preflight.device_name=H100", "run.device=cpu"),
        "preflight.device_name",
        "run.device=auto",
    ),
    "no layout that fits": (
        ("model=llama3_70b", "preflight.mode=plan", "preflight.devices=2", "preflight.device_memory=16GiB"),
        "preflight.devices",
        "more devices",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name: str, refused: Refused) -> None:
    arguments, key, remedy = WRONG[name]
    message = refused(*arguments)
    assert message.startswith(f"error: {key}"), message
    assert remedy in re.sub(r"\s+", " ", message), message
