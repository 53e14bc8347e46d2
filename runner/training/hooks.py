"""Calls of the hooks of a run. A request or a failure of a hook on one rank takes effect on all ranks."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import get_args

from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_keys
from components.contracts.errors import ConfigError, TrainingError
from components.contracts.hook import Hook, HookRun, Request

log = logging.getLogger("runner")


class Hooks:
    """The hooks of a run, called in their order on every rank.

    Args:
        run: the object through which hooks see the run and make requests.
        own: hooks of the program itself, which make the same requests on every rank.
        chosen: the hooks of the configuration, by name.
        beat: called with what follows, before each call of one of these, which may take long, and after all.
    """

    def __init__(
        self,
        run: HookRun,
        own: Mapping[str, Hook],
        chosen: Mapping[str, Hook],
        beat: Callable[[str], object] = str,
    ) -> None:
        self.run, self.chosen, self.beat = run, dict(chosen), beat
        self.hooks = [*own.items(), *chosen.items()]  # a hook may have the name of one of the program's own
        self.stop = False
        """Whether a hook has requested the end of the training."""

    def begin(self) -> None:
        """Prepare the hooks, and read their tensors from the checkpoint that the run resumes from."""
        self.call("begin")
        checkpoint = self.run.resumed_from
        if checkpoint is None:
            return
        saved = saved_keys(checkpoint)
        for name in list(self.chosen):
            found = self._tensors(name)
            if found and not saved & found.keys():
                log.info("hook.%s: %s was saved without it, so it begins here", name, checkpoint)
            elif found:
                load_tensors(checkpoint, found, together=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all chosen hooks, by their keys in a checkpoint.

        A hook that fails is removed if its ``on_error`` is ``warn``.

        Raises:
            TrainingError: if a hook fails whose ``on_error`` is ``stop``.
        """
        return {key: tensor for name in list(self.chosen) for key, tensor in self._tensors(name).items()}

    def _tensors(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        hook = self.chosen[name]
        self._attempt(name, hook, "tensors", lambda: found.update(hook.tensors()))
        return {f"hook/{name}/{key}": value for key, value in found.items()} if name in self.chosen else {}

    def call(self, event: str, *arguments: object, **options: object) -> None:
        """Call the method ``event`` of every hook, then share their requests between the ranks.

        A chosen hook that fails is removed if its ``on_error`` is ``warn``.

        Raises:
            TrainingError: if a hook fails whose ``on_error`` is ``stop``.
        """
        shares = bool(self.chosen)  # before a hook is removed, which may have made a request on this rank
        for name, hook in list(self.hooks):
            if hook is self.chosen.get(name):
                self.beat(f"in {event} of hook.{name} at step {self.run.state.step}")
            method = partial(getattr(hook, event), replace(self.run, name=name))
            self._attempt(name, hook, event, partial(method, *arguments, **options))
        if shares:
            self._agree()
            self.beat(f"after {event} of the hooks at step {self.run.state.step}")
        self.stop |= "stop" in self.run.requests

    def take(self, request: Request) -> bool:
        """Return whether a hook on any rank has made ``request`` since the last call, and clear it."""
        asked = request in self.run.requests
        self.run.requests.discard(request)
        return asked

    def _attempt(self, name: str, hook: Hook, event: str, work: Callable[[], object]) -> None:
        """Call ``work``, the method ``event`` of a hook; handle a failure on any rank on all ranks."""
        failure: Exception | None = None
        try:
            work()
        except (ConfigError, TrainingError):
            raise  # written for the user
        except Exception as error:  # noqa: BLE001  a hook may raise anything
            failure = error
        reason = f"hook.{name}: {event} failed at step {self.run.state.step}"
        if failure is not None:
            reason = f"{reason}: {type(failure).__name__}: {failure}"
            if hook.on_error == "stop":
                raise TrainingError(reason) from failure
        if hook.on_error == "warn" and self.run.engine.max_over_ranks(float(failure is not None)):
            log.warning("%s; it is left out from here on", reason if failure else f"{reason} on another rank")
            self.hooks.remove((name, hook))
            del self.chosen[name]

    def _agree(self) -> None:
        """Add the requests that hooks have made on any rank to the requests on every rank."""
        agree = self.run.engine.max_over_ranks
        if agree(float(bool(self.run.requests))):
            asked = {request for request in get_args(Request) if agree(float(request in self.run.requests))}
            self.run.requests.update(asked)
