"""The ``hook`` group: components that observe a run and may request an evaluation, a save or a stop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from components.contracts.configs import AdapterConfig, ModelConfig
from components.contracts.data import BatchStats
from components.contracts.engine import Engine, StepResult

Request = Literal["evaluate", "save", "stop"]


class RunState(Protocol):
    """Counters of a run since its first step, the same on every rank."""

    step: int
    """Completed optimizer steps, including skipped ones."""
    num_samples: int
    num_tokens: int
    skipped: int


@dataclass(frozen=True)
class HookRun:
    """The run that a hook observes."""

    folder: Path
    """The run folder."""
    is_main: bool
    """Whether this is rank 0, which writes files."""
    engine: Engine
    """The engine. All ranks call its methods together."""
    model: ModelConfig
    adapter: AdapterConfig | None
    dtype: torch.dtype
    seed: int
    state: RunState
    num_steps: int
    """Number of optimizer steps of the whole run."""
    resumed_from: Path | None
    """The checkpoint that the run has started from. None means that it began at step 0."""
    log: Callable[[Mapping[str, float]], None]
    """Function that writes metrics of step ``state.step`` to the trackers. It does nothing except on rank 0.

    In ``before_update``, this is still the previous step: keep the values of a step for ``after_step``."""
    log_table: Callable[[str, Sequence[Mapping[str, str]]], None]
    """Function that writes a named table of texts to the trackers. It does nothing except on rank 0."""
    name: str = ""
    """The name of the hook that is called. Checkpoints hold its tensors under ``hook/NAME``."""
    requests: set[Request] = field(default_factory=set)

    def ask(self, request: Request) -> None:
        """Request an evaluation, a checkpoint or the end of the training, after the current step.

        A request by one rank is enough. A run that a hook ends counts as completed.
        """
        self.requests.add(request)


@dataclass(kw_only=True)
class Hook:
    """Base class of hooks. Every rank calls every method, in the order in which the hooks are configured.

    With ``on_error=warn``, a hook that raises an error on any rank is removed on all ranks; otherwise the
    error ends the run. ``ConfigError`` and ``TrainingError`` always end it.
    """

    on_error: Literal["stop", "warn"] = "stop"
    generates_text: ClassVar[bool] = False
    """Whether the hook completes prompts with the model, which a reward model cannot."""
    needs_evaluations: ClassVar[bool] = False
    """Whether the hook has no effect in a run without evaluations, which is then refused."""
    weight_copies: ClassVar[int] = 0
    """Number of fp32 copies of the trained weights that the hook keeps, for the estimate of memory. Each rank
    keeps a copy of ``engine.tensors(model_only=True)``."""

    def check(self, name: str) -> None:
        """Raise ConfigError if a requirement of the hook, called ``name``, is missing.

        This is called before any rank starts.
        """

    def check_model(self, name: str, model: ModelConfig) -> None:
        """Raise ConfigError if the hook, called ``name``, cannot be used with ``model``.

        This is called before any rank starts, except in a proof, which has another model.
        """

    def begin(self, run: HookRun) -> None:
        """Prepare for the first step.

        If the run resumes, its checkpoint has been loaded already.
        """

    def before_update(self, run: HookRun) -> None:
        """Observe the gradients of the global batch, before they are clipped and the weights updated.

        ``run.engine.layer_norms()`` returns their norms.
        """

    def after_step(self, run: HookRun, result: StepResult, stats: BatchStats) -> None: ...

    def after_evaluation(self, run: HookRun, metrics: Mapping[str, float]) -> None:
        """Observe the metrics of an evaluation, such as ``eval/loss``, the same on every rank."""

    def after_save(self, run: HookRun, checkpoint: Path) -> None:
        """Observe a complete checkpoint."""

    def end(self, run: HookRun, *, completed: bool) -> None:
        """Handle the end of the run.

        If ``completed``, the export, if there is one, has been written. If not, the run can be resumed.
        """

    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors for each checkpoint, under names that do not depend on the layout.

        On resume, the saved values are copied into these tensors after ``begin``. A DTensor specifies its
        shard.
        """
        return {}
