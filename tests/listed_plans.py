"""Plans in memory, for loaders of tests."""

from collections.abc import Sequence

from components.data.packing import Plan
from components.data.plans import count_steps


class ListedPlans:
    """See ``components.data.plans.CachedPlans``. These are of epochs whose numbers of rows may differ."""

    same_number_of_rows = False
    same_rows = False

    def __init__(self, plans: Sequence[Plan], sequences_per_sample: int = 1) -> None:
        self.plans = plans
        numbers = {row for plan in plans for row in plan.segments[:, 0].tolist()}
        self.num_samples = len(numbers) // sequences_per_sample

    def rows(self, epoch: int) -> int:
        return self.plans[epoch].num_rows

    def plan(self, epoch: int) -> Plan:
        return self.plans[epoch]

    def num_steps(self, global_batch_size: int, *, drop_last: bool = False) -> int:
        return sum(count_steps(plan.num_rows, global_batch_size, drop_last=drop_last) for plan in self.plans)
