"""How often a process looks for reference cycles: rarely while it starts, as usual while it trains.

Imports and the construction of an engine make many objects that stay. By default, Python looks at all of them
again and again meanwhile, which takes a tenth of the time of a start.
"""

import gc

AS_USUAL = gc.get_threshold()
RARELY = 20_000
"""Number of new objects after which the youngest generation is collected while a process starts."""


def collect_rarely() -> None:
    """Collect garbage rarely until ``collect_as_usual`` is called, or until the process ends."""
    gc.set_threshold(RARELY, *AS_USUAL[1:])


def collect_as_usual() -> None:
    """Undo ``collect_rarely``; a process that has not called it keeps its own setting."""
    if gc.get_threshold()[0] == RARELY:
        gc.set_threshold(*AS_USUAL)
