"""The options that decide the batch, the layout, the optimizer, the schedule and the cadences."""

import math

from components.contracts.errors import ConfigError
from runner.commands.importing.sharding import choose_sharding
from runner.commands.importing.translation import Translation, as_number


def choose_batch(work: Translation, ranks: int | None) -> None:
    """Set the layout, ``run.micro_batch_size`` and ``run.global_batch_size``.

    Raises:
        ConfigError: if ``ranks`` is not divisible by the product of the sizes of the layout.
    """
    tp = int(work.number("tensor_parallel_size") or 1)
    cp = int(work.number("context_parallel_size", "sequence_parallel_degree") or 1)
    replicas = int(work.number("dp_replicate_size") or 1)
    shards = int(work.number("dp_shard_size") or 1)
    if ranks is None:
        ranks = tp * cp * replicas * shards
        work.checks["ranks"] = f"it is not given; for {ranks} rank(s). Give ranks=N for the batch of N GPUs"
    if ranks % (tp * cp * replicas):
        raise ConfigError(
            f"ranks: {ranks} is not divisible by {tp * cp * replicas}, the product of the sizes of tensor "
            f"({tp}), context ({cp}) and replicated data parallelism ({replicas}); correct it."
        )
    dp = ranks // (tp * cp)
    if choose_sharding(work, dp) or ranks > 1:
        work.words |= {"parallelism": "fsdp2", "parallelism.dp": dp}
        sizes = {"parallelism.tp": tp, "parallelism.cp": cp, "parallelism.dp_replicate": replicas}
        work.words |= {key: size for key, size in sizes.items() if size > 1}
    micro = int(work.number("per_device_train_batch_size", "micro_batch_size", "train_batch_size") or 1)
    steps = int(work.number("gradient_accumulation_steps") or 1)
    total = work.number("batch_size")
    work.words["run.global_batch_size"] = (int(total) if total else micro * steps) * dp
    work.words["run.micro_batch_size"] = "auto" if work.take("auto_find_batch_size") else micro


def choose_optimizer(work: Translation) -> None:
    """Set ``optimizer.betas``, and keys whose defaults differ from those of the other tool's optimizer."""
    name = str(work.left.get("optim") or work.left.get("optimizer") or "adamw")
    first, second = work.number("adam_beta1"), work.number("adam_beta2")
    work.words["optimizer.betas"] = [0.9 if first is None else first, second]
    if work.take("use_muon"):
        work.left["optim"] = name = "muon"
    if name == "muon" and work.tool == "axolotl":
        if not {"adam_beta1", "adam_beta2"} & {*work.given}:
            work.words["optimizer.betas"] = [0.9, 0.95]
        work.words["optimizer.adjust_lr"] = "original"
        work.checks["optimizer.adjust_lr"] = "on several GPUs, axolotl's Muon may scale its steps otherwise"
    elif name == "sgd":
        work.words["optimizer.momentum"] = 0.0
    elif name == "adafactor":
        work.skip("adam_epsilon", "it has another epsilon")
        work.checks["optimizer.lr"] = (
            "it is relative to the size of each weight here, and absolute there; 1e-2 is the default here"
        )
    elif name == "schedule_free_adamw":
        if not {"lr_scheduler_type", "lr_scheduler"} & {*work.left}:
            work.words["scheduler"] = "cosine"  # axolotl's default; that of this optimizer is constant
        if (warmup := work.left.get("warmup_steps")) is not None and as_number("warmup_steps", warmup) >= 1:
            work.words["optimizer.warmup_steps"] = warmup


def choose_schedule(work: Translation) -> None:
    """Set the length of the run and the keys of the scheduler."""
    steps, epochs = work.number("max_steps") or -1, work.number("num_train_epochs", "num_epochs") or 0.0
    key, length = ("run.max_steps", steps) if steps > 0 else ("run.epochs", epochs)
    work.words[key] = int(length) if length == int(length) else length
    if steps > 0:
        for name in ("num_train_epochs", "num_epochs"):
            work.skip(name, "max_steps takes precedence")
    shape = work.left.get("lr_scheduler_type") or work.left.get("lr_scheduler")
    if shape == "constant":
        for name in ("warmup_steps", "warmup_ratio"):
            work.skip(name, "a constant rate has no warmup there")
    share, warmup = work.number("warmup_ratio"), work.number("warmup_steps")
    if warmup is not None and (warmup >= 1 or (warmup == 0 and work.tool == "axolotl")):
        work.skip("warmup_ratio", "warmup_steps takes precedence")
        work.words |= {"scheduler.warmup_steps": int(warmup)} if warmup else {}
    elif (warmup or share) and warmup != 0:
        work.words["scheduler.warmup_ratio"] = warmup or share
    elif share and "warmup_ratio" in work.given:
        work.words["scheduler.warmup_ratio"] = share
    if work.tool == "axolotl" and "scheduler.warmup_ratio" in work.words and "warmup_ratio" not in work.given:
        work.checks["scheduler.warmup_ratio"] = "axolotl's default, which has 100 steps at most"
    choose_shape(work, shape)


def choose_shape(work: Translation, shape: object) -> None:
    """Set the keys of the scheduler that its shape and the ``lr_scheduler_kwargs`` decide."""
    if shape == "warmup_stable_decay":
        work.words["scheduler.decay_style"] = "cosine"
    elif shape == "inverse_sqrt" and not any(key.startswith("scheduler.warmup_") for key in work.words):
        work.checks["scheduler"] = (
            "without a warmup, the rate there falls over 10,000 steps; here it is optimizer.lr / sqrt(step)"
        )
    rate = as_number("learning_rate", work.left.get("learning_rate") or 0)
    if shape not in (None, "cosine"):
        work.skip("cosine_min_lr_ratio", "only the scheduler cosine reads it there")
    if (least := work.number("cosine_min_lr_ratio")) is not None:
        work.words["scheduler.min_lr"] = least * rate
    settings = work.left.get("lr_scheduler_kwargs")
    known = {"min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps", "decay_type"}
    if isinstance(settings, dict) and {*settings} <= known:
        del work.left["lr_scheduler_kwargs"]
        for name in {"min_lr_rate", "min_lr_ratio"} & {*settings}:
            work.words["scheduler.min_lr"] = float(settings[name]) * rate
        if decay := settings.get("decay_type"):
            work.words["scheduler.decay_style"] = "minus_sqrt" if decay == "1-sqrt" else decay
        names = {"min_lr": "scheduler.min_lr", "num_decay_steps": "scheduler.decay_steps"}
        work.words |= {ours: settings[theirs] for theirs, ours in names.items() if theirs in settings}


def choose_cadences(work: Translation) -> None:
    """Set how often the run evaluates and saves; parts of an epoch become shares of the run."""
    given = work.given
    default = "no"
    if work.tool == "axolotl" and "eval_steps" in given:
        default = "steps"
    elif work.tool == "axolotl" and (given.get("val_set_size") or given.get("test_datasets")):
        default = "epoch"
    strategy = work.take("eval_strategy", "evaluation_strategy") or default
    every = work.number("eval_steps") or as_number("logging_steps", work.left.get("logging_steps", 0))
    cadence(work, "run.eval_every", strategy, every, work.number("evals_per_epoch"))
    saving = work.take("save_strategy")
    saving = "steps" if saving is None or ("save_steps" in given and "save_strategy" not in given) else saving
    every, parts = work.number("save_steps") or 0, work.number("saves_per_epoch")
    cadence(work, "checkpoint.save_every", saving, every, parts)
    for name, chosen in (("eval_steps", strategy), ("save_steps", saving)):
        if chosen != "steps":
            work.skip(name, f"it is read with the strategy steps, which is {chosen}")
    if (patience := work.take("early_stopping_patience", "early_stopping_steps")) is not None:
        work.words |= {"early_stopping.patience": patience, "early_stopping.metric": "eval/loss"}


def cadence(work: Translation, key: str, strategy: str, every: float, parts: float | None) -> None:
    """Set the cadence ``key``, if it is not off.

    It is one epoch, ``every`` steps (a share of the run if below 1), or a ``parts``-th of an epoch.
    ``strategy`` is the other tool's: ``epoch``, ``steps``, ``best`` or ``no``.
    """
    epochs = work.words.get("run.epochs")
    if strategy == "best":
        work.words["checkpoint.keep_best"] = "eval/loss"
    elif parts == 1 or (strategy == "epoch" and not parts):
        work.words[f"{key}_epochs"] = 1
    elif not parts:
        work.words |= {key: int(every) if every >= 1 else every} if strategy == "steps" and every else {}
    elif not isinstance(epochs, int | float):
        work.checks[key] = "the length of an epoch is not known; give the number of steps"
    elif (number := parts * epochs) > 1:
        work.words[key] = math.floor(1e6 / number) / 1e6  # not later than the end of an epoch
