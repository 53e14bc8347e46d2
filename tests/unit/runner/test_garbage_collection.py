"""How often garbage is collected."""

import gc

from runner.garbage_collection import AS_USUAL, collect_as_usual, collect_rarely


def test_a_start_collects_rarely_and_training_as_usual() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_threshold()[0] > 10 * AS_USUAL[0]
        collect_as_usual()
        assert gc.get_threshold() == AS_USUAL
    finally:
        gc.set_threshold(*before)
