"""The causes that stop a run early, tested without a run."""

import shlex
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from components.contracts.engine import Engine
from components.contracts.errors import ConfigError
from components.rank_info import RankInfo
from runner.config.instantiate import Experiment
from runner.config.run_config import seconds
from runner.config.sources import ConfigSources
from runner.launch.final_report import resume_command
from runner.records.job_record import SweepJob
from runner.signals import REQUESTS, SignalHandler, handling, interrupt
from runner.training.assembly import estimated_save_s
from runner.training.stop import StopPolicy

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def heard(*numbers: int, patient: bool = False) -> tuple[SignalHandler, list[int]]:
    told: list[int] = []
    request = SignalHandler(told.append, ignore_second=patient)
    for number in numbers:
        request(number)
    return request, told


def test_the_first_signal_asks() -> None:
    assert heard()[0].number == 0
    request, told = heard(USR1)
    assert (request.number, told) == (USR1, [USR1])


@pytest.mark.parametrize("numbers", [(INT, INT), (TERM, TERM), (INT, TERM), (USR1, TERM, INT)])
def test_the_second_impatient_one_ends_at_once(numbers: tuple[int, ...]) -> None:
    with pytest.raises(KeyboardInterrupt):
        heard(*numbers)
    assert heard(*numbers, patient=True)[0].number in (INT, TERM)


@pytest.mark.parametrize("numbers", [(USR1, USR1), (USR1, TERM), (TERM, USR1)])
def test_what_a_batch_system_sends_one_after_the_other_only_asks(numbers: tuple[int, ...]) -> None:
    """Batch systems send SIGUSR1 before the end, SIGTERM at the end, and SIGKILL a while later."""
    assert heard(*numbers)[0].number in numbers


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in REQUESTS]
    with handling(interrupt):
        handled = [number for number in REQUESTS if number != signal.SIGHUP]  # nohup may ignore SIGHUP
        assert {signal.getsignal(number) for number in handled} == {interrupt}
        with pytest.raises(KeyboardInterrupt, match="SIGUSR2"):
            signal.raise_signal(signal.SIGUSR2)
    assert [signal.getsignal(number) for number in REQUESTS] == before


def test_another_ranks_reason_counts_here() -> None:
    assert StopPolicy(lambda value: max(value, float(TERM)), heard()[0]).poll() == "SIGTERM"


def test_what_one_rank_is_told_of_an_evaluation_counts_on_all() -> None:
    told: list[tuple[int, float]] = []
    asks = StopPolicy(
        lambda value: value, heard()[0], prune=lambda *given: told.append(given) or given[0] > 2
    )
    asks.check_prune(2, 5.0)
    assert asks.reason is None
    asks.check_prune(4, 4.5)
    assert (asks.reason, told) == ("pruned", [(2, 5.0), (4, 4.5)])
    other = StopPolicy(lambda value: max(value, 1.0), heard()[0])
    other.check_prune(4, 4.5)
    assert other.reason == "pruned"


def test_the_first_reason_stays() -> None:
    request, _ = heard()
    stop = StopPolicy(lambda value: value, request)
    assert stop.poll() is None
    request(USR1)
    assert stop.poll() == "SIGUSR1"
    request(TERM)
    assert stop.poll() == "SIGUSR1"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_taken(deadline: float, *, step: float, save: float, save_every: int) -> tuple[int, float]:
    """Return the number of steps until a run stops, and the time left after its last save."""
    clock = Clock()
    stop = StopPolicy(lambda value: value, heard()[0], clock.now + deadline, clock)
    for number in range(1, 1000):
        clock.now += step
        if stop.poll() or number % save_every == 0:
            clock.now += save
            stop.record_save(save)
        if stop.reason:
            assert stop.reason == "run.max_time"
            return number, 1000.0 + deadline - clock.now
    raise AssertionError("it never stopped")


@pytest.mark.parametrize(("step", "save"), [(1, 0.1), (1, 20), (10, 1), (10, 30)])
def test_time_is_left_for_the_last_save_and_little_more(step: float, save: float) -> None:
    _, left = steps_taken(600, step=step, save=save, save_every=3)
    assert 0 < left < 2 * (step + save) + 2 * step + 4


def test_a_first_step_that_compiles_is_soon_forgotten() -> None:
    clock = iter([0.0, 600.0, *(602.0 + 2 * step for step in range(40))])
    stop = StopPolicy(lambda value: value, SignalHandler(str), deadline=3600, clock=lambda: next(clock))
    assert [stop.poll() for _ in range(41)] == [None] * 41
    assert max(stop.steps) == 2


def test_a_long_evaluation_does_not_hide_how_long_steps_are() -> None:
    clock = Clock()
    stop = StopPolicy(lambda value: value, heard()[0], clock.now + 1000, clock)
    clock.now += 60
    assert stop.poll() is None
    for _ in range(750):
        clock.now += 1
        assert stop.poll(evaluates=True) is None, "190 s are left, and a step and a save take 180 at most"
    clock.now += 10
    assert stop.poll(evaluates=True) == "run.max_time"


def test_a_measured_save_replaces_the_estimate() -> None:
    def after(save: Callable[[StopPolicy, Clock], object]) -> str | None:
        clock = Clock()
        stop = StopPolicy(lambda value: value, heard()[0], clock.now + 800, clock, save_s=600)
        save(stop, clock)
        return stop.poll()

    def saved(stop: StopPolicy, clock: Clock, *, is_whole: bool) -> None:
        clock.now += 60
        stop.record_save(60, is_whole=is_whole)

    assert after(partial(saved, is_whole=True)) is None
    assert after(partial(saved, is_whole=False)) == "run.max_time", "it is still being written"
    assert after(lambda stop, _: stop.expect_save(0.0)) == "run.max_time"
    assert after(lambda stop, _: stop.expect_save(60.0)) is None


def test_time_is_left_for_a_first_save_of_unknown_length() -> None:
    def at(now: float, save_s: float) -> str | None:
        clock = iter([now - 1, now])
        stop = StopPolicy(
            lambda value: value, SignalHandler(str), 100, clock=lambda: next(clock), save_s=save_s
        )
        return stop.poll()

    assert at(50, save_s=0) is None
    assert at(50, save_s=60) == "run.max_time"


@pytest.mark.parametrize(("model_only", "save_s"), [(False, 12), (True, 4)])
def test_the_estimate_of_a_save_counts_what_is_written(model_only: bool, save_s: float) -> None:
    options = SimpleNamespace(checkpoint=SimpleNamespace(model_only=model_only))
    engine = SimpleNamespace(describe=lambda: {"trained_parameters": 400e6})
    place = RankInfo(world_size=4, local_world_size=2)
    assert estimated_save_s(cast("Experiment", options), cast("Engine", engine), place) == save_s


def test_a_run_without_time_stops_at_its_first_boundary() -> None:
    assert steps_taken(0.5, step=1, save=0.1, save_every=100)[0] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("01:30:00", 5400),
        ("3h30m", 12600),
        ("45m", 2700),
        ("90s", 90),
        ("1-12:00:00", 129600),
        ("2d", 172800),
    ],
)
def test_times(value: float | str, expected: float) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize("value", [0, -1, "", "soon", "3 hours", "1:30", "00:00:00", "30m3h"])
def test_what_is_no_time(value: float | str) -> None:
    with pytest.raises(ConfigError, match=r"run\.max_time: .* give seconds, HH:MM:SS, or 3h30m"):
        seconds(value)


def test_the_command_that_resumes() -> None:
    command = ["runner", "stage=pt", "checkpoint.resume=auto", "parallelism.pipeline_layout=Et|tL"]
    told = resume_command(command, ConfigSources(), "outputs/a/checkpoints/step_00000003")
    layout = "'parallelism.pipeline_layout=Et|tL'"
    assert told == f"python -m runner stage=pt {layout} checkpoint.resume=outputs/a/checkpoints/step_00000003"
    own = resume_command(["runner"], ConfigSources(), "für/a")
    assert shlex.split(own)[-1] == "checkpoint.resume='für/a'"


@pytest.mark.parametrize(
    ("flag", "words", "expected"),
    [
        ("-m", ("stage=sft",), "stage=sft"),
        ("sweep=mine", ("sweep=mine", "stage=sft"), "sweep=mine stage=sft hydra.mode=RUN"),
        ("experiment=mine", ("experiment=mine", "stage=sft"), "experiment=mine stage=sft hydra.mode=RUN"),
    ],
)
def test_the_command_that_resumes_a_job_of_a_sweep(flag: str, words: tuple[str, ...], expected: str) -> None:
    where = ConfigSources(overrides=words, sweep_job=SweepJob(Path("sweep"), 0, words))
    told = resume_command(["runner", flag], where, "at")
    assert told == f"python -m runner {expected} checkpoint.resume=at"


def test_a_hangup_ends_a_run_unless_nohup_ignores_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for set_by_the_shell, expected in ((signal.SIG_DFL, interrupt), (signal.SIG_IGN, signal.SIG_IGN)):
            signal.signal(signal.SIGHUP, set_by_the_shell)
            with handling(interrupt):
                assert signal.getsignal(signal.SIGHUP) is expected
            assert signal.getsignal(signal.SIGHUP) is set_by_the_shell
    finally:
        signal.signal(signal.SIGHUP, before)
