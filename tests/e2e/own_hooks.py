"""A hook from outside the package: ``hook.NAME._target_=tests.e2e.own_hooks.StopAt``."""

from components.contracts.hook import Hook, HookRun


class StopAt(Hook):
    """Ends the run at ``step``, which may be 0, and logs a metric at its end."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def begin(self, run: HookRun) -> None:
        self._stop(run)

    def after_step(self, run: HookRun, *_: object) -> None:
        self._stop(run)

    def _stop(self, run: HookRun) -> None:
        if run.state.step == self.step:
            run.ask("stop")

    def end(self, run: HookRun, *, completed: bool) -> None:
        if completed:
            run.log({"mine/steps": float(run.state.step)})
