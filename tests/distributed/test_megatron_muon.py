"""Muon on Megatron: the curve of one FSDP2 process in every layout, and resumes between the engines."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import megatron_muon_cases as cases
from tests.distributed.any_to_any_cases import assert_equal, read
from tests.distributed.cases import fsdp2, megatron
from tests.ranks import Ranks

LAYOUTS = {
    "tp2 sp": megatron(tp=2, sequence_parallel=True),
    "tp2dp2 sharded": megatron(tp=2, dp=2, distributed_optimizer=True),
    "tp2dp2": megatron(tp=2, dp=2),
    "pp2vpp2": megatron(pp=2, vpp=2),
    "pp2dp2 sharded": megatron(pp=2, dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    "cp2 sharded": megatron(cp=2, distributed_optimizer=True),
    "dp4ep2 sharded": megatron(dp=4, ep=2, distributed_optimizer=True),
    "tp2ep2etp2 sharded": megatron(
        tp=2, dp=2, sequence_parallel=True, ep=2, etp=2, distributed_optimizer=True
    ),
    "pp2ep2": megatron(pp=2, dp=2, ep=2),
    "dp2": megatron(dp=2),
}


def size(layout: str) -> int:
    on = LAYOUTS[layout]
    return on.model_ranks * (on.dp or 1)


OneProcess = Callable[[str, str], tuple[Path, Tensor]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """Return a function that trains a family once per kind, and returns the folder and the curve."""

    @cache
    def trained(family: str, kind: str) -> tuple[Path, Tensor]:
        folder = tmp_path_factory.mktemp("one")
        return folder, torch.tensor(cases.trained(fsdp2(), family, kind, folder))

    return trained


@pytest.mark.parametrize(
    ("layout", "family", "kind"),
    [
        ("tp2dp2 sharded", "odd", "full"),
        ("pp2dp2 sharded", "qwen2_four", "full"),
        ("tp2ep2etp2 sharded", "qwen3_moe", "full"),
        ("tp2 sp", "qwen3", "lora"),
        ("tp2dp2", "qwen3", "groups"),
        ("pp2vpp2", "qwen2_four", "full"),
        ("cp2 sharded", "llama", "full"),
        ("dp4ep2 sharded", "qwen3_moe", "lora"),
        ("pp2ep2", "qwen3_moe", "full"),
        ("dp4ep2 sharded", "deepseek", "full"),
        ("tp2 sp", "latent", "full"),
        ("tp2 sp", "qwen3", "frozen"),
        ("tp2dp2 sharded", "llama", "mtp"),
        ("dp2", "llama", "built"),
        ("tp2dp2 sharded", "odd", "class"),
        ("tp2dp2 sharded", "odd", "elements"),
    ],
)
def test_a_layout_trains_the_curve_of_one_process(
    megatron_ranks: Ranks, one_process: OneProcess, layout: str, family: str, kind: str, tmp_path: Path
) -> None:
    """Gradients are close in the first steps; a checkpoint of either engine continues on the other."""
    on, ranks = LAYOUTS[layout], size(layout)
    here, back, loaded = (tmp_path / name for name in ("here", "back", "loaded"))
    one, expected = one_process(family, kind)
    for rank in megatron_ranks.run(cases.trained, on, family, kind, here, size=ranks):
        torch.testing.assert_close(torch.tensor(rank), expected, rtol=1e-5, atol=0)
    for rank in megatron_ranks.run(cases.trained, on, family, kind, loaded, one, size=ranks):
        torch.testing.assert_close(torch.tensor(rank), expected[2:], rtol=1e-5, atol=0)
    assert_equal(read(loaded), read(one))
    rest = torch.tensor(cases.trained(fsdp2(), family, kind, back, here))
    torch.testing.assert_close(rest, expected[2:], rtol=1e-5, atol=0)
    assert_equal(read(back), read(here))


@pytest.mark.parametrize(
    ("layout", "family"),
    [("tp2dp2 sharded", "odd"), ("pp2vpp2", "qwen2_four"), ("tp2ep2etp2 sharded", "qwen3_moe")],
)
def test_a_resume_is_bitwise(megatron_ranks: Ranks, layout: str, family: str, tmp_path: Path) -> None:
    on, ranks = LAYOUTS[layout], size(layout)
    straight = megatron_ranks.run(cases.trained, on, family, "full", tmp_path / "straight", size=ranks)[0]
    at = tmp_path / "straight"
    assert (
        megatron_ranks.run(cases.trained, on, family, "full", tmp_path / "again", at, size=ranks)[0]
        == straight[2:]
    )
    assert_equal(read(tmp_path / "again", streams=True), read(at, streams=True))


@pytest.mark.parametrize(("layout", "copies"), [("tp2dp2 sharded", 1), ("tp2dp2", 2), ("pp2dp2 sharded", 1)])
def test_owners_keep_the_master_weights(megatron_ranks: Ranks, layout: str, copies: int) -> None:
    """In bf16; there is one copy of every weight, or one in every replica, and one is written."""
    found = megatron_ranks.run(cases.in_half, LAYOUTS[layout], size=4)
    total = found[0].total
    assert sum(rank.written for rank in found) == total
    tied = 161 * 32 if "pp2" in layout else 0  # the last stage has an embedding of its own
    assert sum(rank.mine for rank in found) == copies * total + tied
    assert all(0 < rank.mine < total for rank in found)
    assert all(rank.held for rank in found)
    assert sum(rank.rounded for rank in found) > 0.9 * copies * total


def test_a_skipped_step_changes_nothing(megatron_ranks: Ranks) -> None:
    assert all(megatron_ranks.run(cases.skipped_step, LAYOUTS["tp2dp2 sharded"]))
