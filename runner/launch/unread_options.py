"""Options that have an effect only if another option is set."""

import os
from collections.abc import Callable
from functools import reduce
from operator import getitem

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.hooks import Samples
from components.preflight.evaluation_checks import may_request_evaluations
from runner.config.instantiate import Experiment
from runner.config.sources import ConfigSources, name_of
from runner.launch.slurm_env import MAX_REQUEUES


def may_evaluate(experiment: Experiment) -> bool:
    """Return whether the run evaluates, or a hook may ask it to."""
    run = experiment.run
    return (
        run.evaluates_after_steps
        or run.eval_on_start
        or run.evaluate_only
        or may_request_evaluations(experiment.hook)
    )


def has_evaluation_data(experiment: Experiment) -> bool:
    """Return whether the data includes evaluation data, as ``data=demo`` and ``data=stdlib`` always do."""
    data = experiment.data
    names = ("eval", "eval_split", "eval_dataset", "eval_fraction")
    return not hasattr(data, "eval_fraction") or any(getattr(data, name, None) for name in names)


SIZES = ("dp", "default_dp", "dp_shard", "dp_replicate", "tp", "pp", "cp")
"""Keys of ``parallelism`` that make up the number of ranks."""
READ_IF: tuple[tuple[str, Callable[[Experiment], object], str], ...] = (
    (
        "profiler.steps profiler.ranks profiler.memory profiler.shapes profiler.stacks",
        lambda e: e.profiler.enabled,
        "profiler.enabled=true",
    ),
    (
        "checkpoint.verify",
        lambda e: e.checkpoint.resume != "never" or e.checkpoint.init_from or MAX_REQUEUES in os.environ,
        "checkpoint.resume or checkpoint.init_from",
    ),
    (
        "checkpoint.allow_mismatch",
        lambda e: e.checkpoint.resume != "never" or MAX_REQUEUES in os.environ,
        "checkpoint.resume",
    ),
    (
        "checkpoint.keep_best_mode",
        lambda e: e.checkpoint.keep_best or e.early_stopping.metric or e.run.evaluate_only,
        "checkpoint.keep_best=eval/loss",
    ),
    (
        "early_stopping.patience early_stopping.mode",
        lambda e: e.early_stopping.metric or e.run.evaluate_only,
        "early_stopping.metric=eval/loss",
    ),
    (
        "run.loss_scale.initial run.loss_scale.growth_interval",
        lambda e: e.run.dtype == "fp16",
        "run.dtype=fp16",
    ),
    (
        "data.eval data.eval_dataset data.eval_split data.max_eval_samples",
        may_evaluate,
        "run.eval_at_end=true",
    ),
    ("data.max_eval_samples", has_evaluation_data, "data.eval or data.eval_fraction"),
    ("preflight.rank", lambda e: e.preflight.mode == "rehearse", "preflight.mode=rehearse"),
    (
        "preflight.steps",
        lambda e: e.preflight.mode in ("rehearse", "prove"),
        "preflight.mode=rehearse or prove",
    ),
    (
        "preflight.shrink.layers preflight.shrink.hidden preflight.shrink.vocabulary "
        "preflight.shrink.max_length",
        lambda e: e.preflight.mode == "prove",
        "preflight.mode=prove",
    ),
    ("preflight.device_memory", lambda e: e.preflight.mode != "prove", "preflight.mode=check"),
    ("model.path", lambda e: getattr(e.model, "reads_path", True), "model=hf or model.init=pretrained"),
    (
        "run.final_sample_tokens",
        lambda e: not (e.run.final_sample_tokens and e.model.scalar_head),  # 0 is off
        "a stage that trains a language model",
    ),
    ("parallelism.fp8_recipe parallelism.fp8_all_gather", lambda e: e.run.dtype == "fp8", "run.dtype=fp8"),
    ("parallelism.default_dp", lambda e: getattr(e.parallelism, "dp", None) is None, "parallelism.dp=null"),
)
"""Keys, the condition under which they are read, and what to set if it does not hold."""


def check_unread_options(experiment: Experiment, config: Config, where: ConfigSources) -> None:
    """Raise ConfigError if the command line or an experiment sets an option that nothing reads.

    Options that a file of the group ``debug`` sets are not checked, because these files limit parts, such as
    evaluation data, that a run need not have.
    """
    for keys, is_read, remedy in READ_IF:
        for key in keys.split():
            *nodes, name = key.split(".")
            value = reduce(getitem, nodes, config).get(name)
            if (
                where.chosen(key, ("sweep", "experiment"))
                and not (value is None or value is False)  # 0 is a rank
                and not is_read(experiment)
            ):
                raise ConfigError(
                    f"{key} ({where.of(key)}): nothing reads it in this run; set {remedy}, or leave it out."
                )
    check_prompts(experiment, where)
    if experiment.preflight.mode == "plan":
        check_planned(experiment, where)


def check_prompts(experiment: Experiment, where: ConfigSources) -> None:
    """Raise ConfigError if the command line or an experiment sets what only prompts of turns read.

    Without that, both options are those of the data, and prompts that are strings may leave them unread.
    """
    samples = ((name, hook) for name, hook in experiment.hook.items() if isinstance(hook, Samples))
    for name, hook in samples:
        for option in ("default_system", "chat_template_kwargs"):
            key = f"hook.{name}.{option}"
            chosen = getattr(hook, option) and where.chosen(key, ("sweep", "experiment"))
            if chosen and all(isinstance(prompt.turns, str) for prompt in hook.read()):
                raise ConfigError(
                    f"{key} ({where.of(key)}): nothing reads it, because every prompt is a string; set "
                    f"hook.{name}.strings=chat, or leave it out."
                )


def check_planned(experiment: Experiment, where: ConfigSources) -> None:
    """Raise ConfigError if the command line sets a key that the search chooses itself.

    It reads the number of ranks, if ``preflight.devices`` does not give it, and keeps a micro-batch size on
    which the loss depends.
    """
    read = () if experiment.preflight.devices else SIZES
    keeps_size = experiment.model.moe.depends_on_microbatches
    for key in map(name_of, where.overrides):
        group, _, name = key.partition(".")
        of_layout = group == "parallelism" and name and name not in (*read, "_target_")
        if of_layout or (key == "run.micro_batch_size" and not keeps_size):
            raise ConfigError(
                f"{key} ({where.of(key)}): nothing reads it, because preflight.mode=plan searches for "
                "layouts and micro-batch sizes itself; leave it out, or use preflight.mode=only."
            )
