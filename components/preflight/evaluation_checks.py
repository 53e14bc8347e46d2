"""Checks of the evaluations of a run, in the parent process, before ranks are spawned."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.checkpoint import read_meta
from components.contracts.errors import CompletedError, ConfigError
from components.contracts.hook import Hook

log = logging.getLogger(__name__)


def check_evaluation(key: str, wanted: float, has_eval: bool, option: str) -> None:
    """Raise ConfigError if evaluations are due without data for them, which ``option`` would name."""
    if wanted and not has_eval:
        raise ConfigError(
            f"run.{key}: is {str(wanted).removesuffix('.0')}, but there is no evaluation data; set {option} "
            f"or data.eval_fraction, or use run.{key}={'false' if key == 'eval_on_start' else 0}."
        )


def check_evaluated_checkpoint(asked: str, found: Path | None, runs: Path) -> None:
    """Raise ConfigError if an evaluation of the newest checkpoint of ``runs`` has found none."""
    if asked == "auto" and found is None:
        raise ConfigError(
            f"checkpoint.resume: is auto, but {runs} has no run with a checkpoint to evaluate; correct "
            "run.name or run.output_dir, or name the run's folder."
        )


def check_evaluated_reference(choice: str, *, other: bool) -> None:
    """Raise ConfigError if weights without their run would be evaluated against themselves.

    ``choice`` is ``ReferenceSource.choice``, and ``other`` whether the reference is another model.
    """
    if choice in ("frozen", "precomputed") and not other:
        raise ConfigError(
            f"stage.reference: is {choice}, but an evaluation without the run compares the weights with "
            "themselves, so all rewards are 0; set stage.reference_path to the model before this training."
        )


def check_evaluate_only(has_eval: bool, hooks: Iterable[str], option: str) -> None:
    """Raise ConfigError if a run that only evaluates has hooks, or has no evaluation data.

    ``option`` is the name of the option for such data, for the message.
    """
    if hooks := sorted(hooks):
        raise ConfigError(f"hook.{hooks[0]}: run.evaluate_only trains nothing to observe; leave it out.")
    if not has_eval:
        raise ConfigError(
            f"run.evaluate_only: there is no evaluation data; set {option} or data.eval_fraction."
        )


def check_early_stop(metric: str, mode: str, patience: int, resume: Path | None) -> None:
    """Raise CompletedError if early stopping has already ended the resumed run."""
    if resume is None:
        return
    state = read_meta(resume).state
    evaluations = state.get("evals_since_best", 0)
    if evaluations >= patience and state.get("best_of") == f"{mode} {metric}":
        raise CompletedError(
            f"early_stopping.metric: in {resume}, {metric} has not improved for {evaluations} evaluations "
            f"already; set early_stopping.patience above {evaluations}, or early_stopping.metric=null.",
            resume.absolute().parent.parent,
        )


def may_request_evaluations(hooks: Mapping[str, Hook]) -> bool:
    """Return whether a hook may request evaluations; those of this program do not."""
    return any(not type(hook).__module__.startswith("components.hooks") for hook in hooks.values())


def check_evaluating_hooks(hooks: Mapping[str, Hook], *, evaluates: bool) -> None:
    """Raise ConfigError if a hook acts after evaluations, and the run has none."""
    for name, hook in hooks.items():
        if hook.needs_evaluations and not evaluates:
            raise ConfigError(
                f"hook.{name}: acts after evaluations, and this run has none; set data.eval or "
                "data.eval_fraction, and run.eval_every or run.eval_at_end=true."
            )


def warn_of_held_out(fraction: float) -> None:
    log.warning(
        "data.eval_fraction=%g: this share of the samples is held out, but not evaluated in this run; use "
        "python -m runner.evaluate.",
        fraction,
    )


def warn_of_late_evaluations(watching: Iterable[str], num_steps: int) -> None:
    """Warn that the options ``watching`` wait for evaluations of which none is due before the end."""
    for key in watching:
        log.warning(
            "%s: no evaluation is due before the end of the run, after %d steps; run.eval_every may be a "
            "share of the run, such as 0.1.",
            key,
            num_steps,
        )
