"""Reference passes: other reference models, and log-probabilities that are computed in advance."""

from pathlib import Path

import pytest
import torch

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed import reference_cases as cases
from tests.distributed.cases import fsdp2, make_engine, megatron, share
from tests.ranks import Ranks

LAYOUTS = {"fsdp2": fsdp2(2), "pp2": megatron(dp=1, pp=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save_reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("on", LAYOUTS.values(), ids=LAYOUTS)
def test_another_model_is_scored_as_transformers_does(
    megatron_pair: Ranks, folder: Path, on: FSDP2 | Megatron
) -> None:
    """The reference has another architecture than the trained model and is not changed by training."""
    expected, found = cases.plain_logps(folder), {}
    for answer in megatron_pair.run(cases.other_model, on, folder):
        found |= answer or {}
    assert sorted(found) == [0, 2, 4, 6]
    for first, logps in found.items():
        torch.testing.assert_close(logps[0], torch.cat(expected[first : first + 2]), rtol=0, atol=2e-5)


def test_what_one_layout_computes_every_layout_reads(megatron_pair: Ranks, tmp_path: Path) -> None:
    """Caches of one process and of two, on either engine, are bitwise right on the same layout.

    On other layouts they are equal up to rounding.
    """
    data, alone = cases.prepare(tmp_path), fsdp2()
    cases.fill(alone, data, tmp_path / "one")
    error, largest = cases.difference(alone, data, tmp_path / "one")
    assert error == 0
    assert largest > 5
    for name, on in LAYOUTS.items():
        assert max(megatron_pair.run(cases.fill_and_ask, on, data, tmp_path / name))[0] == 0
        assert not (tmp_path / name / "scratch").exists()
        assert cases.difference(alone, data, tmp_path / name)[0] < 1e-5 * largest
        assert max(megatron_pair.run(cases.difference, on, data, tmp_path / "one"))[0] < 1e-5 * largest


@pytest.mark.parametrize("on", [fsdp2(), megatron(dp=1)], ids=["fsdp2", "megatron"])
def test_what_is_computed_once_is_without_dropout(tmp_path: Path, on: FSDP2 | Megatron) -> None:
    data = cases.prepare(tmp_path)
    cases.fill(on, data, tmp_path / "cache", "dropping")
    assert cases.difference(on, data, tmp_path / "cache", "dropping")[0] == 0


def test_passes_without_backward_add_nothing_to_the_lists_of_fsdp() -> None:
    engine = make_engine()
    for _ in range(2):
        engine.logps(share(engine, "packed", 2))
        assert not engine.scorer._get_fsdp_state()._comm_ctx.post_forward_order
    engine.close()
