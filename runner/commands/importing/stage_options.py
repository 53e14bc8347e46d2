"""The options that decide the stage and its loss, the model, its dtype and its adapter."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from components.contracts.errors import ConfigError
from runner.commands.importing.options import translate_option
from runner.commands.importing.translation import Translation, as_list, as_number
from runner.conf_folder import config_dir

ADAPTERS = ("none", "lora", "qlora", "dora")
"""Options of the group ``adapter``, in ascending order of precedence if several are chosen."""


def choose_stage(work: Translation, stage: str | None, file: str) -> None:
    """Set ``stage`` and, if the tool's stage is a loss of another stage here, ``stage.loss``.

    Raises:
        ConfigError: if the stage is missing, or does not exist here.
    """
    theirs = work.take("stage", "rl")
    if work.tool == "axolotl" and work.take("reward_model"):
        theirs = "rm"
    loss = work.left.get("pref_loss") or work.left.get("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if theirs == "dpo" and loss in ("orpo", "simpo"):
        theirs = work.take("pref_loss")
    if work.tool == "axolotl" and theirs is None:
        sources = [item for item in as_list(work.left.get("datasets")) if isinstance(item, dict)]
        streamed = "pretraining_dataset" in work.given
        documents = sources and all(item.get("type") == "completion" for item in sources)
        theirs = "pt" if streamed or documents else "sft"
    if theirs is None and {"desirable_weight", "undesirable_weight"} & {*work.given}:
        theirs = "kto"  # no other stage of TRL has them
    if theirs == "ipo":
        theirs, work.words["stage.loss"] = "dpo", "ipo"
    chosen = stage or theirs
    if chosen is None:
        raise ConfigError(
            f"stage: {file} names no stage; add one to the command: stage=sft, rm, dpo, kto, orpo or cpo."
        )
    if not Path(config_dir(), "stage", f"{chosen}.yaml").is_file():
        raise ConfigError(f"stage: {chosen} of {file} does not exist here; give another one, as stage=sft.")
    work.words["stage"] = chosen


OF_PAIRS = ("rm", "dpo", "kto", "orpo", "cpo", "simpo")
UNREAD_THERE: Mapping[str, tuple[Sequence[str], str]] = {
    "label_smoothing_factor": (OF_PAIRS, "the loss of this stage does not read it there"),
    "pref_loss": (["kto"], "the loss of this stage does not read it there"),
    "enable_thinking": (["pt"], "a document has no turns"),
    "default_system": (["pt"], "a document has no turns"),
    "default_system_message": (["pt"], "a document has no turns"),
    "mask_history": (["pt", *OF_PAIRS], "this stage has no conversations of several answers"),
    "train_on_inputs": (["pt", "rm"], "this stage masks no prompts"),
    "train_on_prompt": (["pt", "rm"], "this stage masks no prompts"),
}
"""Option -> the stages in which the other tool does not read it either, and the reason."""

SMOOTHED_BY_TRL = frozenset({"aot", "aot_unpaired", "exo_pair", "robust"})
"""Losses of TRL's DPO in which ``label_smoothing`` is read."""


def choose_loss(work: Translation) -> None:
    """Translate the options of the loss whose meaning depends on the stage."""
    stage = work.words["stage"]
    for name, (stages, why) in UNREAD_THERE.items():
        if stage in stages:
            work.skip(name, why)
    if work.tool == "trl" and stage == "sft":
        choose_targets(work)
        if (kind := work.take("loss_type")) in ("nll", "chunked_nll"):
            work.needless["loss_type"] = "it is the loss of stage=sft"
        elif kind is not None:
            work.lacks("loss_type", "stage=sft has the negative log-likelihood only")
    losses = as_list(work.left.get("loss_type", "sigmoid"))
    if work.tool == "trl" and stage == "dpo" and SMOOTHED_BY_TRL.isdisjoint(losses):
        of = ", ".join(sorted(SMOOTHED_BY_TRL))
        why = f"TRL reads it in {of} only; give stage.label_smoothing for conservative DPO"
        work.skip("label_smoothing", why)
    share = work.take("pref_ftx")
    if share and stage in ("dpo", "cpo", "simpo"):
        work.words["stage.rpo_alpha" if stage == "dpo" else "stage.cpo_alpha"] = share
    elif share:
        work.lacks("pref_ftx", f"stage={stage} has no such term")
    if stage == "orpo" and work.tool != "llamafactory":
        work.checks["stage"] = "the likelihood in TRL's ORPO is that of prompt and answer, here of the answer"
    for name in {"router_aux_loss_coef", "moe_aux_loss_coef"} & {*work.given}:
        if (strength := as_number(name, work.given[name])) == 0:
            work.skip(name, "it is off")
            continue
        work.words["model.moe.aux_loss"] = "switch"
        work.checks["model.moe.aux_loss_coef"] = (
            f"{strength:g} there is as strong as {strength:g} * K / L here, with K experts per token and L "
            "layers; if the model has no experts, leave out model.moe.aux_loss and model.moe.aux_loss_coef"
        )


def choose_reference(work: Translation) -> None:
    """Translate how the reference model is chosen and updated."""
    every, mixup = work.take("ref_model_sync_steps"), work.take("ref_model_mixup_alpha")
    if work.take("sync_ref_model"):
        work.words |= {"stage.sync_reference_every": every or 512, "stage.sync_reference_mixup": mixup or 0.6}
    else:
        idle = {*work.given} & {"ref_model_sync_steps", "ref_model_mixup_alpha"}
        work.needless |= dict.fromkeys(idle, "sync_ref_model is off")
    saved = {"adapter_name_or_path", "lora_model_dir"} & {*work.given}
    if saved and "ref_model" not in work.given and work.words["stage"] in ("dpo", "kto"):
        work.words["stage.reference"] = "adapter_off"
        work.checks["stage.reference"] = "the reference is the model without the adapter, as there"


def choose_targets(work: Translation) -> None:
    """Translate the two options that decide whether TRL's sft trains on prompts."""
    names = ("assistant_only_loss", "completion_only_loss")
    given = {name: value for name in names if (value := work.take(name)) is not None}
    if True in given.values():
        work.needless |= dict.fromkeys(given, "only the answers are trained by default")
    elif given.get("completion_only_loss") is False:
        work.words["data.train_on_prompt"] = True
    else:
        work.checks["data.train_on_prompt"] = (
            "TRL trains on every token of conversations (messages); give data.train_on_prompt=true for that"
        )


def choose_model(work: Translation) -> None:
    name = "base_model" if work.tool == "axolotl" else "model_name_or_path"
    if (path := work.take(name)) is None:
        raise ConfigError(f"{name}: the configuration names no model; add it.")
    work.words |= {"model": "hf", "model.path": path}
    if work.left.get("trust_remote_code"):
        work.checks["model.trust_remote_code"] = (
            "leave it out if the model brings no code of its own; every command on the run asks for it again"
        )
    if work.left.get("fp8"):
        for name in ("bf16", "pure_bf16"):
            work.skip(name, "run.dtype=fp8 has bf16 for everything else")
        if work.left.get("fp8_enable_fsdp_float8_all_gather"):
            work.words["parallelism.fp8_recipe"] = "tensorwise"
    elif work.tool == "llamafactory" and not {"bf16", "fp16", "pure_bf16"} & {*work.given}:
        work.checks["run.dtype"] = "LLaMA-Factory computes in the dtype of the folder; often run.dtype=bf16"
    elif any(work.left.get(name) for name in ("pure_bf16", "bfloat16", "float16")):
        work.checks["run.dtype"] = (
            "weights and the state of the optimizer are fp32 here, and take more memory"
        )
    if work.left.get("gradient_checkpointing") in ("offload", "offload_disk"):
        work.words["parallelism.activation_offloading"] = True
    if work.left.get("disable_gradient_checkpointing"):
        work.skip("use_unsloth_gc", "disable_gradient_checkpointing turns it off")


def choose_saved_adapter(work: Translation) -> None:
    """Take the last of several saved adapters, which LLaMA-Factory trains after it has merged the others."""
    *merged, last = str(work.left.get("adapter_name_or_path")).split(",")
    if merged:
        work.left["adapter_name_or_path"] = last.strip()
        work.missing[f"adapter_name_or_path={','.join(merged)}"] = "merge them with runner.export first"


def choose_adapter(work: Translation) -> None:
    """Set ``adapter``, and drop the tool's default LoRA options unless a new adapter is trained.

    A run without an adapter, or one that continues a saved adapter, does not read them. Options that the file
    itself gives are kept. In LLaMA-Factory ``lora_alpha`` is by default twice the rank.
    """
    if work.left.get("finetuning_type") == "freeze":
        work.missing["finetuning_type=freeze"] = (
            "it counts layers, and model.train_only names them; without "
            "model.train_only=['model.layers.31.*', ...], the command trains all weights"
        )
        del work.left["finetuning_type"]
    chosen = []
    for name in list(work.left):
        row = work.row(name)
        if row is not None and row.here.partition("=")[0] == "adapter":
            translate_option(work, name)
            chosen.append(str(work.words.pop("adapter", "none")))
    frozen = {"lora", "qlora"} & {*chosen}
    adapter = max(chosen, key=ADAPTERS.index) if frozen else "none"
    if {"qlora", "dora"} <= {*chosen}:
        work.missing["4 bits"] = "adapter=dora has no quantised weights; use adapter=qlora without dora"
    kept = adapter != "none" and not {"adapter_name_or_path", "lora_model_dir"} & {*work.given}
    if adapter != "none":
        work.words["adapter"] = adapter
        choose_dropout(work)
    if work.left.get("lora_target_linear"):
        work.skip("lora_target_modules", "lora_target_linear names all linear layers")
    if not work.left.get("pissa_init"):
        work.skip("pissa_iter", "pissa_init is off")
    elif (iterations := work.take("pissa_iter")) != -1:
        work.words["adapter.pissa_niter"] = 16 if iterations is None else iterations
    if not kept:
        work.left = {
            name: value for name, value in work.left.items() if "lora" not in name or name in work.given
        }
    elif work.tool == "llamafactory" and "lora_alpha" not in work.given:
        work.left["lora_alpha"] = 2 * int(as_number("lora_rank", work.left["lora_rank"]))
    elif work.tool == "trl" and "lora_target_modules" not in work.given:
        work.checks["adapter.target_modules"] = (
            "peft's default for Llama and Qwen; other models have other ones"
        )


def choose_dropout(work: Translation) -> None:
    """Drop ``lora_dropout`` where the other tool's trainer turns all dropout off, that of adapters too."""
    without = ["dpo", "kto", "orpo", "cpo", "simpo"]
    if work.tool != "llamafactory":  # its reward trainer is not TRL's
        without.append("rm")
    if work.words["stage"] in without and work.given.get("disable_dropout") is not False:
        work.skip("lora_dropout", "the trainer of this stage turns dropout off")
