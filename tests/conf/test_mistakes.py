"""Every mistake ends with exit code 2 and one or two lines that name the option, the fault and the remedy."""

import json
from pathlib import Path

import pytest
import torch

from tests.conf.conftest import Refused

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}

# id: (arguments, words of the message). {tmp} stands for the folder of the fixture ``files``.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    # ---- names
    "group option": (["stage=sfd"], ["stage=sfd", "did you mean 'sft'"]),
    "group": (["stag=sft"], ["stag", "did you mean 'stage'"]),
    "model option": (["model=tinny"], ["model=tinny", "tiny"]),
    "number for an option": (["optimizer=5"], ["optimizer (the command line): 5", "adamw"]),
    "hub id for an option": (["model=Qwen/Qwen3-0.6B"], ["model=hf model.path=Qwen/Qwen3-0.6B"]),
    "file for an option": (["data=chats.jsonl"], ["data=files data.train=chats.jsonl"]),
    "text of the environment": (["run.seed='${oc.env:NO_SUCH_SEED,x}'"], ["run.seed", "'x'"]),
    "sweep of nothing": (["-m", "run.seed=range(0)"], ["run.seed=range(0)", "at least one value"]),
    "sweep without steps": (
        ["-m", "run.seed=range(0,5,0)"],
        ["run.seed=range(0,5,0)", "must not be zero; correct it"],
    ),
    "step of a swept range": (
        ["-m", "hydra/sweeper=optuna", "hydra.sweeper.params={optimizer.lr:'range(0.1,0.5,0.0)'}"],
        ["optimizer.lr=range(0.1,0.5,0.0): Invalid range", "correct it"],
    ),
    "swept interval without its end": (
        ["-m", "hydra/sweeper=optuna", "hydra.sweeper.params={optimizer.lr:'interval(1e-4,1e-2'}"],
        ["optimizer.lr=interval(1e-4,1e-2: no viable", "correct it"],
    ),
    "folder of a sweep": (
        ["-m", "hydra/sweeper=optuna", "hydra.sweep.dir='${run.name}'", "run.seed=1,2"],
        ["hydra.sweep.dir: is not known when a sweep starts", "${run.output_dir}"],
    ),
    "stage without its key": (["sft", "model=hf"], ["sft (the command line)", "use stage=sft."]),
    "command of another tool": (
        ["train", "sft.yaml", "data.train=a.json"],
        ["sft.yaml: is not an option; use python -m runner.import_config TOOL sft.yaml"],
    ),
    "--config of another tool": (
        ["sft", "--config", "sft.yaml"],
        ["--config: is not an option; use python -m runner.import_config TOOL FILE."],
    ),
    "home in a path": (["checkpoint.init_from=~/no/such"], [f"{Path.home()}/no/such", "run folder"]),
    "home in a list": (
        ["data=files", "data.sources=[{path: ~/no/such.jsonl}]"],
        [f"{Path.home()}/no/such.jsonl"],
    ),
    "home of nobody": (
        ["data=files", "data.train=~nobody-at-all/x.jsonl"],
        ["data.train", "no user 'nobody-at-all'"],
    ),
    "home of nobody, quoted": (
        ["data=files", "data.train='~nobody-at-all/x.jsonl'"],
        ["data.train=~nobody-at-all/x.jsonl", "write ./~nobody-at-all"],
    ),
    "home of nobody in a sweep": (
        ["-m", "run.seed=1,2", "run.output_dir='~nobody-at-all/x'"],
        ["hydra.sweep.dir=~nobody-at-all/x", "no user 'nobody-at-all'"],
    ),
    "home of a user": (["checkpoint.init_from=~root/no/such"], [f"{Path('~root').expanduser()}/no/such"]),
    "experiment option": (["experiment=pretrain_wds"], ["experiment=pretrain_wds", "pretrain_wsd"]),
    "bytes that are no text": (["run.output_dir=a\udcff"], ["run.output_dir=a\\udcff", "not UTF-8"]),
    "run key": (["run.max_stepz=3"], ["run.max_stepz", "did you mean 'run.max_steps'"]),
    "run key beside a swept group": (
        ["-m", "optimizer=adamw,sgd", "run.max_stepz=3"],
        ["run.max_stepz", "did you mean 'run.max_steps'"],
    ),
    "option of another tool": (["lr=1e-4"], ["lr", "use optimizer.lr"]),
    "long option": (["--cutoff_len", "4096"], ["--cutoff_len", "KEY=VALUE", "use data.max_length"]),
    "key of an own class": (["optimizer=torch", "optimizer.betas=[0.9,0.9]"], ["use +optimizer.betas=VALUE"]),
    "key of a group": (
        ["optimizer.groups=[{match: '*', lrr: 1}]"],
        ["optimizer.groups.0.lrr", "nothing reads this key"],
    ),
    "pattern of a group": (
        ["optimizer.groups=[{match: '*.qq.*', lr: 1}]"],
        ["groups[0].match", "a name is like"],
    ),
    "a part of a tensor": (
        ["parallelism=megatron", "optimizer.groups=[{match: '*.q_proj.*', lr: 1}]"],
        ["optimizer.groups", "one tensor in this layout"],
    ),
    "key of no class": (["optimizer=torch", "+optimizer.bets=1"], ["did you mean 'optimizer.betas'"]),
    "option of a class": (
        ["optimizer=torch", "+optimizer.betas=[0.9]"],
        ["optimizer._target_", "RAdam cannot"],
    ),
    "range of an option of a class": (
        ["optimizer=torch", "+optimizer.betas=[2,3]"],
        ["optimizer.betas", "below 1, got [2, 3]"],
    ),
    "optimizer without a rate": (
        ["optimizer=torch", "optimizer._target_=torch.optim.Optimizer"],
        ["optimizer._target_", "Optimizer has no argument lr"],
    ),
    "component key": (["optimizer.lrr=1"], ["optimizer.lrr", "did you mean 'optimizer.lr'"]),
    "added root key": (["+foo=1"], ["foo", "the command line", "nothing reads"]),
    "added run key": (["+run.stepz=1"], ["run.stepz", "the command line"]),
    "added component key": (["+optimizer.momentun=1"], ["optimizer.momentun", "nothing reads"]),
    "key in an experiment file": (
        ["--config-dir={tmp}/conf", "experiment=typo"],
        ["run.log_evry", "experiment/typo.yaml", "did you mean 'run.log_every'"],
    ),
    "component key in an experiment file": (
        ["--config-dir={tmp}/conf", "experiment=typo2"],
        ["optimizer.warmup", "experiment/typo2.yaml"],
    ),
    "key of another choice": (["optimizer=sgd", "+optimizer.betas=[0.9,0.9]"], ["optimizer.betas"]),
    "class": (
        ["stage._target_=nowhere.Loss"],
        ["stage._target_", "nowhere.Loss (Module", "name an installed class"],
    ),
    "package that is not installed": (
        ["--config-dir={tmp}/conf", "optimizer=absent"],
        ["optimizer/absent.yaml): cannot import", "; pip install no_such_package."],
    ),
    "key that an option of one's own leaves out": (
        ["--config-dir={tmp}/conf", "optimizer=absent", "optimizer.betas=[0.9,0.9]"],
        ["use +optimizer.betas=VALUE"],
    ),
    "function as a class": (
        ["stage._target_=os.system", "+stage.command=touch {tmp}/ran"],
        ["stage._target_ (the command line): os.system is not a class;", "contracts.loss.Loss"],
    ),
    "keys without a value": (
        ["stage._target_=tests.e2e.losses.Demanding"],
        [
            "stage.strength, stage.floor (conf/stage/",
            "): are missing; give +stage.strength=VALUE +stage.floor=VALUE.",
        ],
    ),
    "class of something else": (["~stage", "+stage._target_=builtins.dict"], ["stage._target_", "lacks"]),
    "logger": (["logger=[jsonl,wadb]"], ["logger=wadb", "did you mean 'wandb'"]),
    "key of a logger": (["logger=[wandb]", "logger.wandb.moed=x"], ["did you mean 'logger.wandb.mode'"]),
    "added key of a logger": (
        ["+logger.console.bar=true"],
        ["logger.console.bar (the command line)", "logger.console.progress"],
    ),
    "value of a logger": (["logger=wandb", "logger.wandb.mode=off"], ["logger.wandb.mode", "'offline'"]),
    "logger that is not chosen": (["logger.wandb.mode=offline"], ["logger.wandb", "logger=[jsonl,wandb]"]),
    "logger without a name": (["+logger.mode=offline"], ["logger.mode", "logger.wandb.mode"]),
    "rows of a head": (["optimizer=muon", "optimizer.head_dim=7"], ["optimizer.head_dim", "use 32"]),
    "rows of a head of an adapter": (
        ["optimizer=muon", "optimizer.head_dim=64", "adapter=lora"],
        ["optimizer.head_dim", "use null"],
    ),
    "rows of a head for AdamW": (
        ["optimizer=muon", "optimizer.head_dim=32", "optimizer.adamw_for=[*_proj.weight]"],
        ["optimizer.head_dim", "use null"],
    ),
    "rows of a frozen head": (
        ["optimizer=muon", "optimizer.head_dim=32", "model.freeze=[*self_attn*]"],
        ["optimizer.head_dim", "use null"],
    ),
    "evaluation of nothing": (
        ["run.evaluate_only=true", "checkpoint.resume=auto", "run.name=absent"],
        ["checkpoint.resume: is auto", "absent has no run with a checkpoint"],
    ),
    "proof on a GPU": (
        ["preflight.mode=prove", "run.device=cuda"],
        ["run.device: is cuda", "prove", "use run.device=auto"],
    ),
    "length of the rows of a proof": (
        ["preflight.mode=prove", "preflight.shrink.max_length=0"],
        ["preflight.shrink.max_length", "at least 1"],
    ),
    "rehearsal of an evaluation": (
        ["run.evaluate_only=true", "preflight.mode=rehearse"],
        ["preflight.mode: is rehearse", "run.evaluate_only", "preflight.mode=only"],
    ),
    **{
        f"evaluation with {option}": (
            ["run.evaluate_only=true", option],
            [f"{option.partition('=')[0]}: run.evaluate_only takes no step"],
        )
        for option in (
            *("checkpoint.save_every=2", "checkpoint.save_every_epochs=1", "run.eval_on_start=true"),
            *("run.loss_spike_factor=3", "run.max_consecutive_skips=2"),
        )
    },
    "several values without a sweep": (
        ["optimizer.lr=1e-3,1e-4"],
        ["optimizer.lr=1e-3,1e-4 (", "use -m for a sweep of them, or optimizer.lr=[1e-3,1e-4] if it"],
    ),
    "several options without a list": (
        ["logger=jsonl,wandb"],
        ["use -m for a sweep of them, or logger=[jsonl,wandb]."],
    ),
    "several models": (["model=tiny,moe_tiny"], ["has several values; use -m for a sweep of them."]),
    "several sets": (["data=files", "data.eval=a,b"], ["or data.eval='{a: FILE, b: FILE}' for several sets"]),
    "several values of another tool": (["lora_target=q_proj,v_proj"], ["use adapter.target_modules"]),
    "another command": (["chat", "model=tiny"], ["is a command of its own; use python -m runner.chat."]),
    "hook": (["hook=[emma]"], ["hook=emma", "did you mean 'ema'"]),
    "hook that is not chosen": (["hook.ema.decay=0.9"], ["hook.ema", "choose it: hook=[ema]"]),
    "value of a hook": (["hook=[ema]", "hook.ema.decay=2"], ["hook.ema.decay", "below 1"]),
    "hook without its file": (["hook=[samples]"], ["hook.samples.prompts"]),
    "hook of another kind": (["+hook.mine._target_=builtins.dict"], ["hook.mine._target_", "is not a Hook"]),
    "hook without a name": (["+hook.on_error=warn"], ["hook.on_error", "hook.ema.decay"]),
    "a hook that completes prompts": (
        ["stage=rm", "hook=[samples]", "hook.samples.prompts=x"],
        ["hook.samples", "reward model"],
    ),
    "no hooks": (["hook=null"], ["hook", "ema, gradient_stats, samples"]),
    "no loggers": (["logger=null"], ["logger", "jsonl, tensorboard, wandb"]),
    "no option": (["model=null"], ["model", "known: deepseek_tiny, hf"]),
    "syntax": (["run.max_steps=["], ["run.max_steps=[", "the command line"]),
    "key of the chosen data": (["data=files", "data.trian=x"], ["data.trian", "did you mean 'data.train'"]),
    "experiment of one's own": (["--config-dir={tmp}/conf", "experiment=typpo"], ["did you mean 'typo"]),
    "malformed YAML": (["--config-dir={tmp}/conf", "experiment=tab"], ["tab.yaml:2", "malformed YAML"]),
    **{
        f"{name} as YAML": (["--config-dir={tmp}/conf", f"experiment={name}"], [words])
        for name, words in {
            "binary": "cannot be composed (UnicodeDecodeError",
            "scalar": "cannot be composed",
            "deep": "cannot be composed (RecursionError",
            "cyclic": "cannot be composed (RecursionError",
            "no_key": "{tmp}/conf: ",
        }.items()
    },
    "defaults of itself": (["--config-dir={tmp}/conf", "experiment=itself"], ["cannot be composed"]),
    "path that is too long": (
        ["data=files", f"data.train=/{'a/' * 5000}x.jsonl"],
        ["/a/a/a", "File name too long", "name another path"],
    ),
    "folder of Hydra": (["hydra.run.dir=/proc/x"], ["/proc/x", "name another path"]),
    "glob of nothing": (["-m", "model=glob(*nothing*)"], ["model=glob(*nothing*)", "at least one value"]),
    "no mapping": (["run=null"], ["run", "mapping"]),
    # ---- types and values
    "text for a number": (["run.max_steps=many"], ["run.max_steps", "the command line", "'many'"]),
    "fraction for a count": (["run.max_steps=1.5"], ["run.max_steps", "1.5"]),
    "text for a rate": (["optimizer.lr=fast"], ["optimizer.lr", "'fast'"]),
    "number for a switch": (["data.shuffle=3"], ["data.shuffle"]),
    "choice": (["run.dtype=fp4"], ["run.dtype", "'bf16'"]),
    "loss scale of bf16": (
        ["run.dtype=bf16", "run.loss_scale.initial=2"],
        ["run.loss_scale.initial", "nothing reads it", "run.dtype=fp16"],
    ),
    "path of a random model": (
        ["model.path=Qwen/Qwen3-0.6B"],
        ["model.path", "nothing reads it", "model.init=pretrained"],
    ),
    "mapping of a group's keys": (
        ["profiler={steps: [5,6],memory: true}"],
        ["profiler.steps", "nothing reads it", "profiler.enabled=true"],
    ),
    "loss scale": (["run.loss_scale.initial=0.5"], ["run.loss_scale.initial", "at least 1"]),
    "endless loss scale": (["run.loss_scale.initial=inf"], ["run.loss_scale.initial", "at most"]),
    "growth of the loss scale": (["run.loss_scale.growth_interval=0"], ["growth_interval", "at least 1"]),
    "choice of a component": (["data.packing=bdf"], ["data.packing", "'bfd'"]),
    "null": (["run.seed=null"], ["run.seed"]),
    "list": (["optimizer.betas=0.9"], ["optimizer.betas"]),
    "zero steps": (["run.max_steps=0"], ["run.max_steps", "at least 1"]),
    "no length": (["run.max_steps=null"], ["run.max_steps", "run.epochs"]),
    "negative cadence": (["run.log_every=-1"], ["run.log_every"]),
    "no duration": (["run.max_time=soon"], ["run.max_time", "HH:MM:SS"]),
    "negative timeout": (["run.hang_timeout_s=-1"], ["run.hang_timeout_s", "at least 0"]),
    "negative restarts": (["run.max_restarts=-1"], ["run.max_restarts", "at least 0"]),
    "restarts without a state": (
        ["run.max_restarts=1", "checkpoint.model_only=true"],
        ["run.max_restarts", "checkpoint.model_only=false"],
    ),
    "a spike that is none": (["run.loss_spike_factor=1"], ["run.loss_spike_factor: must be above 1"]),
    "negative rate": (["optimizer.lr=-1e-3"], ["optimizer.lr"]),
    "beta": (["stage=dpo", "stage.beta=0"], ["stage.beta"]),
    "reference without an adapter": (
        ["stage=dpo", "stage.reference=adapter_off"],
        ["stage.reference", "adapter=none", "frozen"],
    ),
    "reference that is not there": (
        ["stage=dpo", "stage.reference_path=/nowhere"],
        ["stage.reference_path=/nowhere", "no such folder"],
    ),
    "reference where there is none": (["stage.reference=frozen"], ["stage.reference", "nothing reads"]),
    "smoothing": (["stage.label_smoothing=1.5"], ["stage.label_smoothing"]),
    "kind of loss": (["stage=dpo", "stage.loss=sigmoyd"], ["stage.loss", "'sigmoid'"]),
    "option of another loss": (
        ["stage=dpo", "stage.loss=hinge", "stage.label_smoothing=0.1"],
        ["stage.label_smoothing", "stage.loss=hinge", "robust"],
    ),
    "reference of a loss without one": (
        ["stage=orpo", "+stage.reference=frozen"],
        ["stage.reference", "nothing reads"],
    ),
    "answers without labels": (
        ["stage=kto", "data=files", "data.train={tmp}/chat.jsonl"],
        ["chat.jsonl", "stage=kto", "'label'"],
    ),
    "warmup longer than the run": (
        ["run.max_steps=5", "scheduler.warmup_steps=9"],
        ["scheduler.warmup_steps"],
    ),
    "seed": (["run.seed=18446744073709551616"], ["run.seed", "2**63"]),
    "no output folder": (["run.output_dir="], ["run.output_dir: is empty"]),
    "no output folder of a sweep": (["-m", "run.seed=1,2", "run.output_dir="], ["run.output_dir: is empty"]),
    "output folder": (["run.output_dir={tmp}/chat.jsonl"], ["run.output_dir"]),
    "name": (["run.name=a/b"], ["run.name"]),
    "ranks": (["parallelism=fsdp2", "parallelism.dp=0"], ["parallelism.dp"]),
    "copies": (
        ["parallelism=hsdp", "parallelism.dp_replicate=0"],
        ["parallelism.dp_replicate", "at least 1"],
    ),
    "ranks on copies": (
        ["parallelism=hsdp", "parallelism.dp=6", "parallelism.dp_replicate=4"],
        ["parallelism.dp_replicate: 4", "parallelism.dp = 6", "use 2 or 3"],
    ),
    "copies and their ranks": (
        ["parallelism=hsdp", "parallelism.dp=6", "parallelism.dp_shard=2"],
        ["parallelism.dp: 6 is not 4", "leave out parallelism.dp"],
    ),
    "ranks of a copy": (["parallelism=fsdp2", "parallelism.dp_shard=0"], ["parallelism.dp_shard"]),
    "initial checkpoint": (
        ["+model.initial_checkpoint=/x"],
        ["model.initial_checkpoint", "checkpoint.init_from"],
    ),
    # ---- arithmetic and fit
    "global batch": (["run.global_batch_size=5"], ["run.global_batch_size", "use 4 or 6"]),
    "global batch on ranks": (
        ["parallelism=fsdp2", "parallelism.dp=4", "run.global_batch_size=4"],
        ["run.global_batch_size", "use 8"],
    ),
    "shared prompt without pairs": (
        ["data.share_prompt=true"],
        ["data.share_prompt", "leave it out with stage=sft"],
    ),
    "shared prompt without packing": (
        ["stage=dpo", "data.share_prompt=true", "data.packing=none"],
        ["data.share_prompt", "data.packing=bfd"],
    ),
    "shared prompt that is trained": (
        ["stage=dpo", "data.share_prompt=true", "data.train_on_prompt=true"],
        ["data.share_prompt", "data.train_on_prompt=true"],
    ),
    "shared prompt on Megatron": (
        ["stage=dpo", "data.share_prompt=true", "parallelism=tp2"],
        ["data.share_prompt", "Megatron", "use parallelism=fsdp2"],
    ),
    "noise on a shared prompt": (
        ["stage=dpo", "data.share_prompt=true", "model.neftune_alpha=5"],
        ["model.neftune_alpha", "data.share_prompt=false"],
    ),
    "dropout of shared prompts": (
        ["stage=dpo", "data.share_prompt=true", "adapter=lora", "adapter.dropout=0.1"],
        ["adapter.dropout", "data.share_prompt=false"],
    ),
    "negative noise": (["model.neftune_alpha=-1.0"], ["model.neftune_alpha", "at least 0"]),
    "profile of nobody": (["profiler.enabled=true", "profiler.ranks=[]"], ["profiler.ranks", "use [0]"]),
    "fused kernels without a GPU": (["run.kernels=liger"], ["run.kernels", "GPU", "run.kernels=auto"]),
    "fused kernels on Megatron": (
        ["run.kernels=liger", "parallelism=tp2"],
        ["run.kernels", "parallelism.transformer_impl"],
    ),
    "plain kernels on Megatron": (
        ["run.kernels=torch", "parallelism=tp2"],
        ["run.kernels: is torch", "parallelism.transformer_impl=local"],
    ),
    "profile of no step": (
        ["profiler.enabled=true", "profiler.steps=[4,3]"],
        ["profiler.steps", "use [3, 4]"],
    ),
    "profile after the end": (
        ["profiler.enabled=true", "run.max_steps=3"],
        ["profiler.steps", "3 steps", "run.max_steps"],
    ),
    "profile of no rank": (
        ["profiler.enabled=true", "profiler.ranks=[0,1]"],
        ["profiler.ranks", "no rank 1"],
    ),
    "compiled blocks of Megatron": (
        ["run.compile=true", "parallelism=tp2"],
        ["run.compile", "Megatron", "use parallelism=fsdp2"],
    ),
    "small vocabulary": (["model.architecture.vocab_size=4096"], ["8192", "4096"]),
    "normalisation of cut samples": (
        ["stage=pt", "stage.normalize=sequence"],
        ["stage.normalize", "data.packing"],
    ),
    # ---- layouts
    "reduction": (
        ["parallelism=fsdp2", "parallelism.reduce_gradients=never"],
        ["reduce_gradients", "'every'"],
    ),
    "recomputation": (["parallelism.activation_checkpointing=half"], ["activation_checkpointing", "'full'"]),
    "size of another engine": (["parallelism.tp=2"], ["parallelism.tp", "nothing reads"]),
    "rope that sees a part of a row": (
        [
            "parallelism=fsdp2_cp2",
            "model.architecture.rope_parameters.rope_type=dynamic",
            "+model.architecture.rope_parameters.factor=2.0",
        ],
        ["parallelism.cp", "rope_type=dynamic", "parallelism.cp=1"],
    ),
    "size of FSDP2": (["parallelism=fsdp2_cp2", "parallelism.cp=0"], ["parallelism.cp", "at least 1"]),
    "a model that nobody cut": (
        [
            "parallelism=fsdp2_tp2",
            "~model.architecture",
            "+model.architecture={model_type: gpt2, n_embd: 64, n_layer: 2, n_head: 2, vocab_size: 8192, "
            "bos_token_id: 0, eos_token_id: 0}",
        ],
        ["parallelism.tp", "gpt2", "parallelism=fsdp2 or parallelism=hsdp"],
    ),
    "model of another engine": (
        ["parallelism=tp2", "model.architecture.model_type=gemma"],
        ["gemma", "llama, mistral, qwen2, qwen3", "parallelism=fsdp2"],
    ),
    "activation of another engine": (
        ["parallelism=tp2", "model.architecture.hidden_act=gelu"],
        ["hidden_act=gelu", "parallelism=fsdp2"],
    ),
    "rope of another engine": (
        [
            "parallelism=tp2",
            "model.architecture.rope_parameters.rope_type=dynamic",
            "+model.architecture.rope_parameters.factor=2.0",
        ],
        ["rope_type=dynamic", "llama3", "parallelism=fsdp2"],
    ),
    "rope by the longest sequence": (
        [
            "model.architecture.rope_parameters.rope_type=longrope",
            "+model.architecture.rope_parameters.original_max_position_embeddings=256",
            "+model.architecture.rope_parameters.factor=16.0",
            f"+model.architecture.rope_parameters.short_factor={[1.0] * 16}",
            f"+model.architecture.rope_parameters.long_factor={[2.0] * 16}",
        ],
        ["data.max_length: 512", "longrope", "data.max_length=256 or less"],
    ),
    "tokens that an adapter would not train": (
        ["model.chat_template=llama3", "model.add_tokens=true", "adapter=lora"],
        ["model.add_tokens", "tied to the head", "use adapter=none"],
    ),
    "rows that an adapter would not train": (
        [
            *("model.chat_template=llama3", "model.add_tokens=true", "adapter=lora"),
            *("adapter.modules_to_save=[lm_head]", "model.architecture.tie_word_embeddings=false"),
        ],
        ["model.add_tokens", "adapter.modules_to_save=[embed_tokens,lm_head]", "adapter=none"],
    ),
    "tokens of no template": (["model.add_tokens=true"], ["model.add_tokens", "name one of them"]),
    # ---- files
    "a cadence between": (["run.eval_every=1.5"], ["run.eval_every", "a share of the run below 1"]),
    "no evaluation before the run": (
        ["data=files", "data.train={tmp}/chat.jsonl", "run.eval_on_start=true"],
        ["run.eval_on_start", "no evaluation data"],
    ),
    "no target": (["run.target_loss=nan"], ["run.target_loss", "must be a finite number"]),
    "a negative cadence": (["checkpoint.save_every=-1"], ["checkpoint.save_every", "must be 0 (off)"]),
    "no epoch": (["run.max_steps=null", "run.epochs=0"], ["run.epochs", "must be above 0"]),
    "no sample": (["data.max_samples=0"], ["data.max_samples", "at least 1"]),
    "no sample of a source": (
        ["data=files", "data.sources=[{path: {tmp}/chat.jsonl, max_samples: 0}]"],
        ["data.sources[0].max_samples", "a whole number above 0"],
    ),
    "no columns of a source": (
        ["data=files", "data.sources=[{path: {tmp}/chat.jsonl, columns: null}]"],
        ["data.sources[0].columns", "a mapping of names"],
    ),
    "an expert in a group of its own": (
        ["model=moe_tiny", "optimizer.groups=[{match: '*experts.1.*', lr: 1}]"],
        ["optimizer.groups", "experts.1.gate_proj.weight are in one tensor in this layout"],
    ),
    "up in a group without gate": (
        ["model=moe_tiny", "optimizer.groups=[{match: '*up_proj*', lr: 1}]"],
        ["optimizer.groups", "experts.0.up_proj.weight are in one tensor in this layout"],
    ),
    "unknown column": (
        ["data=files", "data.train={tmp}/chat.jsonl", "data.columns={mesages: x}"],
        ["data.columns.mesages", "is not a field"],
    ),
    "no data": (["data=files"], ["data.train"]),
    "missing file": (["data=files", "data.train={tmp}/nowhere.jsonl"], ["data.train", "nowhere.jsonl"]),
    "missing eval file": (
        ["data=files", "data.train={tmp}/chat.jsonl", "data.eval={tmp}/nowhere.jsonl"],
        ["data.eval", "nowhere.jsonl"],
    ),
    "malformed line": (["data=files", "data.train={tmp}/broken.jsonl"], ["broken.jsonl:2"]),
    "unknown format": (["data=files", "data.train={tmp}/odd.jsonl"], ["odd.jsonl:1"]),
    "unknown extension": (["data=files", "data.train={tmp}/data.xyz"], ["data.xyz"]),
    "empty file": (["data=files", "data.train={tmp}/empty.jsonl"], ["empty.jsonl"]),
    "wrong kind": (["data=files", "data.train={tmp}/text.jsonl", "stage=dpo"], ["text.jsonl", "stage"]),
    "nothing supervised": (
        ["data=files", "data.train={tmp}/long.jsonl", "data.max_length=16"],
        ["long.jsonl", "data.max_length"],
    ),
    "weights": (
        ["data=files", "data.sources=[{path: {tmp}/chat.jsonl, repeats: -1}]"],
        ["data.sources[0].repeats"],
    ),
    "old name of repeats": (
        ["data=files", "data.sources=[{path: {tmp}/chat.jsonl, weight: 2}]"],
        ["data.sources[0].weight", "repeats"],
    ),
    "option of all sources": (
        ["data=files", "data.sources=[{path: {tmp}/chat.jsonl, roles: {a: user}}]"],
        ["data.sources[0].roles", "use data.roles, which holds for all sources"],
    ),
    "part of a file": (
        ["data=files", "data.train={tmp}/chat.jsonl", "data.split=train[:90%]"],
        ["data.split", "data.max_samples and data.eval_fraction"],
    ),
    "nothing to evaluate on": (
        ["data=files", "data.train={tmp}/chat.jsonl", "run.eval_every=2"],
        ["run.eval_every: is 2, but", "data.eval_fraction"],
    ),
    # ---- models
    "no path": (["model=hf"], ["model.path"]),
    "folder without a config": (["model=hf", "model.path={tmp}"], ["model.path", "config.json"]),
    "pretrained without a path": (["model.init=pretrained"], ["model.path"]),
    "model type": (["model.architecture.model_type=qwen33"], ["qwen33"]),
    "architecture key": (["+model.architecture.hiden_size=3"], ["hiden_size"]),
    "tokenizer folder": (["model.tokenizer={tmp}/nowhere"], ["model.tokenizer"]),
    # ---- adapters
    "adapter target": (
        ["adapter=lora", "adapter.target_modules=[q_prj]"],
        ["adapter.target_modules", "q_prj", "q_proj"],
    ),
    "key of another option": (["data.train={tmp}/chat.jsonl"], ["data.train", "data=files does"]),
    "key of several options": (["stage.beta=0.1"], ["stage.beta", "stage=dpo"]),
    "several names of other tools": (
        ["learning_rate=1e-5", "cutoff_len=512"],
        ["optimizer.lr", "cutoff_len (data.max_length)", "runner.import_config"],
    ),
    "values of other tools": (
        ["packing=true", "lora_target=all"],
        ["packing=true, use data.packing=bfd", "lora_target (adapter.target_modules=all-linear"],
    ),
    "data set of another tool": (
        ["data=alpaca_en_demo"],
        ["use data=llamafactory data.dataset=alpaca_en_demo"],
    ),
    "optimizer of another tool": (["optimizer=adamw_torch"], ["use optimizer=adamw."]),
    "file of another tool": (["examples/train_lora.yaml"], ["runner.import_config"]),
    "adapter part": (
        ["adapter=lora", "adapter.target_modules=attn"],
        ["adapter.target_modules", "'attn'", "attention"],
    ),
    "adapter rank": (["adapter=lora", "adapter.r=129"], ["adapter.r: 129", "use at most 128"]),
    "adapter path": (["adapter=lora", "adapter.path={tmp}"], ["adapter.path", "adapter_config.json"]),
    "experts in 4 bits": (["model=moe_tiny", "adapter=qlora"], ["adapter.quantize", "experts"]),
    "reference in full precision": (
        ["adapter=qlora", "stage=dpo", "stage.reference=frozen"],
        ["stage.reference", "adapter.quantize", "adapter_off"],
    ),
    "adapter of some experts": (
        ["model=moe_tiny", "adapter=lora", "adapter.target_modules=[gate_proj]"],
        ["adapter.target_modules", "up_proj"],
    ),
    "dropout on experts": (
        ["model=moe_tiny", "adapter=lora", "adapter.dropout=0.1"],
        ["adapter.dropout", "peft"],
    ),
    "adapter of a shared expert": (
        [
            "model=deepseek_tiny",
            "model.moe.bias_update_rate=0",
            "adapter=lora",
            "adapter.target_modules=[model.layers.1.mlp.shared_experts.up_proj]",
        ],
        ["adapter.target_modules", "not in an expert"],
    ),
    "biases under an adapter": (
        ["model=deepseek_tiny", "adapter=lora"],
        ["model.moe.bias_update_rate: is 0.001", "adapter=none"],
    ),
    "adapter of split experts": (
        ["model=moe_tiny", "adapter=lora", "parallelism=fsdp2_tp2"],
        ["parallelism.tp: 2", "adapter.target_modules=attention"],
    ),
    "saved modules beside experts alone": (
        [
            *("model=moe_tiny", "parallelism=fsdp2_ep2", "adapter=lora", "adapter.target_modules=mlp"),
            *("adapter.modules_to_save=[lm_head]", "model.architecture.tie_word_embeddings=false"),
        ],
        ["adapter.modules_to_save", "adapter.target_modules=all-linear"],
    ),
    "key of another adapter": (["adapter.r=4"], ["adapter.r", "nothing reads"]),
    "dora on tp": (["adapter=dora", "parallelism=fsdp2_tp2"], ["adapter.dora", "parallelism.tp=1"]),
    "freeze": (["model.freeze=[embed]"], ["model.freeze", "'embed'", "model.embed_tokens.weight"]),
    "train_only": (
        ["model.train_only=[embed]"],
        ["model.train_only", "'embed'", "model.embed_tokens.weight"],
    ),
    "train_only and freeze": (
        ["model.train_only=['*mlp*']", "model.freeze=['*norm*']"],
        ["model.train_only", "model.freeze is given too"],
    ),
    "freeze and adapter": (["adapter=lora", "model.freeze=['*mlp*']"], ["model.freeze", "adapter=none"]),
    # ---- resume and device
    "resume path": (["checkpoint.resume={tmp}/nowhere"], ["checkpoint.resume", "nowhere"]),
    "resume without a checkpoint": (["checkpoint.resume={tmp}"], ["checkpoint.resume"]),
    "best of another set": (
        ["checkpoint.keep_best=eval/chat/loss", "run.eval_every=1"],
        ["checkpoint.keep_best", "'eval/chat/loss'", "data.eval", "use a metric of eval"],
    ),
    "stream by epochs": (
        [
            "data=files",
            "data.train={tmp}/chat.jsonl",
            "data.streaming=true",
            "checkpoint.save_every_epochs=1",
        ],
        ["checkpoint.save_every_epochs", "no epochs", "use checkpoint.save_every"],
    ),
    "evaluations of a stream by epochs": (
        ["data=files", "data.train={tmp}/chat.jsonl", "data.streaming=true", "run.eval_every_epochs=1"],
        ["run.eval_every_epochs", "no epochs", "use run.eval_every."],
    ),
    "reference of a stream": (
        [
            "stage=dpo",
            "data=files",
            "data.train={tmp}/pair.jsonl",
            "data.streaming=true",
            "stage.reference=precomputed",
        ],
        ["stage.reference", "use stage.reference=frozen"],
    ),
    "best of nothing": (["checkpoint.keep_best=eval/loss"], ["checkpoint.keep_best", "run.eval_every"]),
    "best of a train metric": (
        ["checkpoint.keep_best=train/loss", "run.eval_every=1"],
        ["checkpoint.keep_best", "eval/loss"],
    ),
    "early stop without evaluations": (
        ["early_stopping.metric=eval/loss"],
        ["early_stopping.metric", "run.eval_every"],
    ),
    "two metrics": (
        [
            "stage=rm",
            "checkpoint.keep_best=eval/loss",
            "early_stopping.metric=eval/accuracy",
            "early_stopping.mode=max",
            "run.eval_every=1",
        ],
        ["early_stopping.metric", "max eval/accuracy", "min eval/loss", "name one"],
    ),
    "best of a metric without a mode": (
        ["stage=dpo", "checkpoint.keep_best=eval/rewards/accuracies", "run.eval_every=1"],
        ["checkpoint.keep_best_mode", "eval/rewards/accuracies", "Use max"],
    ),
    "early stop without a mode": (
        ["stage=dpo", "early_stopping.metric=eval/rewards/accuracies", "run.eval_every=1"],
        ["early_stopping.mode", "eval/rewards/accuracies", "Use max"],
    ),
    "samples without evaluations": (
        ["hook=[samples]", "hook.samples.prompts={tmp}/text.jsonl", "run.eval_at_end=false"],
        ["hook.samples", "acts after evaluations", "run.eval_every"],
    ),
    "samples of strings with a system turn": (
        ["hook=[samples]", "hook.samples.prompts={tmp}/text.jsonl", "hook.samples.default_system=S"],
        ["hook.samples.default_system", "every prompt is a string", "hook.samples.strings=chat"],
    ),
    "samples with a variable that the template does not read": (
        [
            *("stage=sft", "hook=[samples]", "hook.samples.prompts={tmp}/pair.jsonl"),
            *("hook.samples.strings=chat", "hook.samples.chat_template_kwargs={foo: 1}"),
        ],
        ["hook.samples: {tmp}/pair.jsonl:1: the chat template does not read foo", "Remove it"],
    ),
    "samples of a first evaluation": (
        [
            "hook=[samples]",
            "hook.samples.prompts={tmp}/text.jsonl",
            "run.eval_at_end=false",
            "run.eval_on_start=true",
        ],
        ["hook.samples", "acts after evaluations", "run.eval_every"],
    ),
    "samples without evaluation data": (
        [
            "hook=[samples]",
            "hook.samples.prompts={tmp}/text.jsonl",
            "data=files",
            "data.train={tmp}/chat.jsonl",
        ],
        ["hook.samples", "acts after evaluations", "data.eval"],
    ),
    "share of a log": (["run.log_every=1.5"], ["run.log_every", "a share of the run below 1"]),
    "best without evaluation data": (
        ["checkpoint.keep_best=eval/loss", "run.eval_every=1", "data=files", "data.train={tmp}/chat.jsonl"],
        ["run.eval_every", "data.eval"],
    ),
    "patience": (["early_stopping.patience=0"], ["early_stopping.patience"]),
    "centre of rewards": (["stage=rm", "stage.center_rewards_coefficient=-1"], ["at least 0, got -1"]),
    "scalar head": (["+model.scalar_head=true"], ["model.scalar_head", "is set from stage"]),
    "frozen score": (["stage=rm", "model.freeze=[score.*]"], ["model.freeze", "score.weight, the head"]),
    "no score": (["stage=rm", "model.train_only=['*.mlp.*']"], ["model.train_only", "score.weight"]),
    "completion by scores": (["stage=rm", "run.final_sample_tokens=8"], ["run.final_sample_tokens"]),
    "further tokens of a score": (["stage=rm", "model.mtp.num_layers=1"], ["model.mtp.num_layers"]),
    "metric mode": (["checkpoint.keep_best_mode=best"], ["checkpoint.keep_best_mode", "min"]),
    "save error": (["checkpoint.on_error=ignore"], ["checkpoint.on_error", "continue"]),
    "cuda": (["run.device=cuda"], ["run.device", "cuda"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("mistakes")
    lines = {
        "chat": [json.dumps(CHAT)],
        "broken": [json.dumps(CHAT), '{"messages": ['],
        "odd": ['{"colour": "blue"}'],
        "empty": [],
        "pair": [json.dumps({"prompt": "why", "chosen": "because", "rejected": "no"})],
        "text": ['{"text": "once upon a time"}'],
        "long": [json.dumps({"instruction": "why " * 200, "output": "because"})],
    }
    for name, content in lines.items():
        (tmp / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in content))
    (tmp / "data.xyz").write_text("?")
    (tmp / "conf" / "experiment").mkdir(parents=True)
    header = "# @package _global_\n"
    (tmp / "conf/experiment/typo.yaml").write_text(header + "run:\n  log_evry: 3\n")
    (tmp / "conf/experiment/typo2.yaml").write_text(header + "optimizer:\n  warmup: 3\n")
    odd = {
        "binary": b"\x80\xff\0",
        "scalar": b"5",
        "deep": b"run: {name: " + b"[" * 3000 + b"]" * 3000 + b"}",
        "cyclic": b"run: &r\n  name: *r\n",
        "no_key": b"run:\n  null: 2\n",
        "itself": b"defaults: [itself]\n",
    }
    for name, raw in odd.items():
        (tmp / f"conf/experiment/{name}.yaml").write_bytes(header.encode() + raw)
    (tmp / "conf/optimizer").mkdir()
    (tmp / "conf/optimizer/absent.yaml").write_text("_target_: no_such_package.Sophia\nlr: 1e-3\n")
    (tmp / "conf/experiment/tab.yaml").write_text("run:\n\tmax_steps: 3\n")
    return tmp


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str, files: Path, refused: Refused) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arguments, words = MISTAKES[name]
    message = refused(*(argument.replace("{tmp}", str(files)) for argument in arguments))
    for word in words:
        assert word.replace("{tmp}", str(files)) in message
