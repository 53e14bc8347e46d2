"""The search space of a sweep, converted from Hydra's override syntax to Optuna's distributions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import IntervalSweep, Override, Sweep

from components.contracts.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def as_overrides(params: Mapping[str, object] | None) -> list[str]:
    """Return ``hydra.sweeper.params``, which a sweep file sets, in the form of command-line overrides."""
    return [f"{key}={value}" for key, value in (params or {}).items()]


@dataclass(frozen=True)
class SearchSpace:
    """The overrides of a command: fixed ones, which all jobs have, and swept ones, by key."""

    fixed: tuple[str, ...]
    swept: Mapping[str, Override]

    @classmethod
    def of(cls, overrides: Sequence[Override]) -> "SearchSpace":
        """Build the space; if a key is given several times, the last value is used.

        Raises:
            ConfigError: if no key varies.
        """
        last: dict[str, Override] = {}
        for override in overrides:
            key = override.get_key_element()
            same = [one for one in last if one != key and one.lstrip("+") == key.lstrip("+")]
            last = {one: value for one, value in last.items() if one not in same} | {key: override}
        swept = {key: override for key, override in last.items() if override.is_sweep_override()}
        if not swept:
            raise ConfigError(
                "hydra/sweeper=optuna: nothing is swept; give a range, such as "
                "'optimizer.lr=tag(log, interval(1e-4, 1e-2))', or choices, such as optimizer.lr=1e-3,3e-3."
            )
        fixed = (str(override.input_line) for key, override in last.items() if key not in swept)
        return cls(tuple(fixed), swept)

    def overrides(self, values: Mapping[str, object]) -> list[str]:
        """Return the overrides of one job, given the ``values`` of the swept keys."""
        return [*self.fixed, *(f"{key}={values[key]}" for key in self.swept)]

    def to_json(self) -> list[str]:
        """Return all overrides in a fixed order, equal for commands with the same search space."""
        return sorted([*self.fixed, *(str(override.input_line) for override in self.swept.values())])

    def examples(self) -> list[list[str]]:
        """Return overrides of jobs that cover every choice, but not every combination."""
        choices = {
            key: choices_of(o) if o.is_choice_sweep() else first_of(o) for key, o in self.swept.items()
        }
        longest = max(len(values) for values in choices.values())
        return [
            self.overrides({key: values[min(n, len(values) - 1)] for key, values in choices.items()})
            for n in range(longest)
        ]

    def distributions(self) -> "dict[str, BaseDistribution]":
        return {key: optuna_distribution(override) for key, override in self.swept.items()}

    def grid(self) -> dict[str, list[str] | list[float]]:
        """Return all values of each key.

        Raises:
            ConfigError: if a key has infinitely many values (an interval).
        """
        for key, override in self.swept.items():
            if override.is_interval_sweep():
                raise ConfigError(
                    f"hydra.sweeper.sampler: is grid, but {key}={override.get_value_string()} has no grid; "
                    "use choice(...) or range(...), or sampler=tpe."
                )
        return {key: choices_of(o) if o.is_choice_sweep() else numbers_of(o) for key, o in self.swept.items()}

    def size(self) -> int:
        """Return the number of points of the grid."""
        return math.prod(len(values) for values in self.grid().values())


def choices_of(override: Override) -> list[str]:
    """Return the choices as text, sorted if they are shuffled, because a study requires a fixed order."""
    choices = [*override.sweep_string_iterator()]
    return sorted(choices) if getattr(override.value(), "shuffle", False) else choices


def numbers_of(override: Override) -> list[float]:
    return sorted(override.sweep_iterator())


def first_of(override: Override) -> list[float]:
    if override.is_range_sweep():
        return numbers_of(override)[:1]
    return [override.value().start]


def optuna_distribution(override: Override) -> "BaseDistribution":
    """Return Optuna's distribution of one swept override.

    Raises:
        ConfigError: if the override has an unsupported tag or is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep, words = override.value(), str(override.input_line)
    tags = sweep.tags if isinstance(sweep, Sweep) else set()
    if tags - {"log"} or (tags and not isinstance(sweep, IntervalSweep)):
        raise ConfigError(f"{words}: the only tag is log, for an interval(...); leave it out.")
    if override.is_choice_sweep():
        return CategoricalDistribution(choices_of(override))
    if override.is_range_sweep():
        numbers = numbers_of(override)
        if not numbers:
            raise ConfigError(f"{words}: is empty; a range(first, end, step) stops before `end`.")
        whole = all(isinstance(number, int) for number in numbers)
        kind: Callable[..., BaseDistribution] = IntDistribution if whole else FloatDistribution
        step = abs(sweep.step)
        last = numbers[-1] if whole else round(numbers[0] + step * (len(numbers) - 1), 12)
        return kind(numbers[0], last, step=step)
    low, high, log = sweep.start, sweep.end, "log" in tags
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        above = "0 < " if log else ""
        raise ConfigError(f"{words}: is empty; an interval(low, high) has {above}low < high.")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)
