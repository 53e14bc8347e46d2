"""A hook that logs the gradient norm of each layer."""

from dataclasses import dataclass

from components.contracts.errors import check_at_least_one
from components.contracts.hook import Hook, HookRun


@dataclass(kw_only=True)
class GradientStats(Hook):
    """Logs the L2 norm of the gradients of each layer, before clipping, as ``grad_norm/LAYER``."""

    every: int = 1
    """Number of steps from one logged row to the next."""

    def __post_init__(self) -> None:
        check_at_least_one("hook.gradient_stats", self, "every")

    def before_update(self, run: HookRun) -> None:
        if (run.state.step + 1) % self.every == 0:
            self.norms = run.engine.layer_norms()

    def after_step(self, run: HookRun, *_: object) -> None:
        if run.state.step % self.every == 0:
            run.log({f"grad_norm/{layer}": norm for layer, norm in self.norms.items()})
