"""Names of keys before version 0.2.0.

On a command line such a name is an error, whose message gives the new name. In the config of an old run
folder it is accepted.
"""

from collections.abc import Mapping

from components.contracts.json_types import Config, Json

RENAMED: Mapping[str, str] = {
    "run.save_every": "checkpoint.save_every",
    "run.save_epochs": "checkpoint.save_every_epochs",
    "run.save_model_only": "checkpoint.model_only",
    "run.keep_last": "checkpoint.keep_last",
    "run.keep_best": "checkpoint.keep_best",
    "run.metric_mode": "checkpoint.keep_best_mode",
    "run.async_save": "checkpoint.async_save",
    "run.on_save_error": "checkpoint.on_error",
    "run.resume": "checkpoint.resume",
    "run.verify": "checkpoint.verify",
    "run.resume_force": "checkpoint.allow_mismatch",
    "run.init_from": "checkpoint.init_from",
    "run.early_stop": "early_stopping.metric",
    "run.patience": "early_stopping.patience",
    "run.profile": "profiler.enabled",
    "run.profile_steps": "profiler.steps",
    "run.profile_ranks": "profiler.ranks",
    "run.profile_memory": "profiler.memory",
    "run.profile_shapes": "profiler.shapes",
    "run.profile_stacks": "profiler.stacks",
    "run.preflight": "preflight.mode",
    "run.devices": "preflight.devices",
    "run.device_memory": "preflight.device_memory",
    "run.device_name": "preflight.device_name",
    "run.timeout": "run.hang_timeout_s",
    "run.max_skips": "run.max_consecutive_skips",
    "run.spike_factor": "run.loss_spike_factor",
    "run.count_zeros": "run.log_num_zeros",
    "run.sample_tokens": "run.final_sample_tokens",
    "model.aux_loss": "model.moe.aux_loss",
    "model.aux_coef": "model.moe.aux_loss_coef",
    "model.z_coef": "model.moe.z_loss_coef",
    "model.bias_rate": "model.moe.bias_update_rate",
    "model.mtp_layers": "model.mtp.num_layers",
    "model.mtp_coef": "model.mtp.loss_coef",
    "parallelism.moe_dispatcher": "parallelism.moe_token_dispatcher",
    "parallelism.drop_policy": "parallelism.moe_token_drop_policy",
    "parallelism.pad_to_capacity": "parallelism.moe_pad_to_capacity",
    "data.overlong": "data.long_samples",
    "adapter.target": "adapter.target_modules",
    "adapter.init": "adapter.init_lora_weights",
}


def with_current_key(override: str) -> str:
    """Return the override of an older run with the current name of its key."""
    key, equals, value = override.partition("=")
    bare = key.lstrip("+~")
    return f"{key[: len(key) - len(bare)]}{RENAMED.get(bare, bare)}{equals}{value}"


def upgraded(config: Config) -> Json:
    """Return the composed config of an older run folder with the current key names."""
    found: Json = {group: dict(node) if isinstance(node, Mapping) else node for group, node in config.items()}
    for old, new in RENAMED.items():
        group, key = old.split(".")
        if isinstance(found.get(group), dict) and key in found[group]:
            node, (*path, name) = found, new.split(".")
            value = found[group].pop(key)
            for part in path:
                node = node.setdefault(part, {})
            node[name] = value
    data = found.get("data")
    # A data class of a user's own may have sources of another kind.
    if isinstance(data, dict) and str(data.get("_target_")).startswith("components.data."):
        for entry in data.get("sources") or ():
            if isinstance(entry, dict) and "weight" in entry:
                entry["repeats"] = entry.pop("weight")
    return found
