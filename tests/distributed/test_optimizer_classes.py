"""Optimizers of other classes than ours: the same curve in every layout, and a resume to the last bit."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from components.models import checkpoint_weights
from tests.distributed import optimizer_class_cases as cases
from tests.distributed.cases import fsdp2
from tests.ranks import Ranks

LAYOUTS = {
    "dp2": fsdp2(2),
    "tp2": fsdp2(1, tp=2),
    "cp2": fsdp2(1, cp=2),
    "ep2": fsdp2(2, ep=2),
    "dp2 copies": fsdp2(2, dp_replicate=2),
    "dp2 tp2": fsdp2(2, tp=2),
}
PROMISED = ("muon", "radam", "lion", "schedule-free", "adamw 8 bit")
ELSEWHERE = {*PROMISED, "muon by head", "adapted"}
"""Optimizers that train on dp2 tp2 or tp2, or on one rank only."""


OneRank = Callable[[str], tuple[Path, Tensor]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Return a function that trains on one rank, once per optimizer, and returns the folder and the curve."""

    @cache
    def trained(name: str) -> tuple[Path, Tensor]:
        folder = tmp_path_factory.mktemp("one")
        return folder, torch.tensor(cases.without_rounding(cases.trained, fsdp2(), name, folder))

    return trained


@pytest.mark.parametrize("name", sorted(cases.DESCRIPTIONS))
def test_a_resume_is_bitwise(name: str, tmp_path: Path) -> None:
    straight = cases.trained(fsdp2(), name, tmp_path)
    assert len(set(straight)) == 5
    for first in (0, 2):
        assert cases.resumed(fsdp2(), name, tmp_path, first) == straight[first:]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "dp2") for name in sorted({*cases.DESCRIPTIONS} - ELSEWHERE)),
        ("schedule-free", "dp2"),
        ("adamw 8 bit", "dp2"),
        ("muon", "dp2 copies"),
        ("lion", "cp2"),
        ("adafactor", "tp2"),
    ],
)
def test_a_layout_trains_the_curve_of_one_rank(
    two: Ranks, one_rank: OneRank, name: str, layout: str, tmp_path: Path
) -> None:
    compare(two, one_rank, name, layout, tmp_path)


@pytest.mark.parametrize("name", PROMISED)
def test_four_ranks_train_the_curve_of_one(four: Ranks, one_rank: OneRank, name: str, tmp_path: Path) -> None:
    compare(four, one_rank, name, "dp2 tp2", tmp_path)


def compare(ranks: Ranks, one_rank: OneRank, name: str, layout: str, folder: Path) -> None:
    """Compare the curve of a layout with that of one rank, and runs that resume in the other one."""
    exact, trained, resumed = cases.without_rounding, cases.trained, cases.resumed
    one, expected = one_rank(name)
    for rank in ranks.run(exact, trained, LAYOUTS[layout], name, folder):
        torch.testing.assert_close(torch.tensor(rank), expected, rtol=1e-5, atol=0)
    for rank in ranks.run(exact, resumed, LAYOUTS[layout], name, one, 2):
        torch.testing.assert_close(torch.tensor(rank), expected[2:], rtol=1e-5, atol=0)
    back = torch.tensor(exact(resumed, fsdp2(), name, folder, 2))
    torch.testing.assert_close(back, expected[2:], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("layout", "family"), [("tp2", "qwen3"), ("cp2", "llama"), ("ep2", "qwen3_moe"), ("dp2", "gemma")]
)
def test_matrices_are_orthogonalised_whole(two: Ranks, layout: str, family: str, tmp_path: Path) -> None:
    on = LAYOUTS[layout]
    expected = torch.tensor(cases.without_rounding(cases.trained, fsdp2(), "muon", tmp_path / "one", family))
    for rank in two.run(cases.without_rounding, cases.trained, on, "muon", tmp_path / "two", family):
        torch.testing.assert_close(torch.tensor(rank), expected, rtol=1e-5, atol=0)
    # Iterations in bfloat16 round by layout and processor, which alone changes these losses by up to 2e-5.
    for rank in two.run(cases.trained, on, "muon", tmp_path / "three", family):
        torch.testing.assert_close(torch.tensor(rank)[:, 0], expected[:, 0], rtol=1e-4, atol=0)


def test_heads_are_orthogonalised_in_every_layout(two: Ranks, tmp_path: Path) -> None:
    name = "muon by head"
    expected = torch.tensor(cases.without_rounding(cases.trained, fsdp2(), name, tmp_path / "one"))
    whole = torch.tensor(cases.without_rounding(cases.trained, fsdp2(), "muon", tmp_path / "whole"))
    assert (whole / expected - 1).abs().max() > 1e-3
    for rank in two.run(cases.without_rounding, cases.trained, LAYOUTS["tp2"], name, tmp_path / "two"):
        torch.testing.assert_close(torch.tensor(rank), expected, rtol=1e-5, atol=0)


def test_muon_is_that_of_torch() -> None:
    assert cases.muon_losses("qwen3") == pytest.approx(cases.by_hand("qwen3"), rel=1e-5)


def test_shards_that_are_orthogonalised_train_another_curve(two: Ranks) -> None:
    expected = cases.fast_muon(fsdp2())
    assert two.run(cases.fast_muon, LAYOUTS["dp2"])[0] == pytest.approx(expected, rel=1e-4)
    assert abs(two.run(cases.fast_muon, LAYOUTS["dp2"], True)[0][-1] / expected[-1] - 1) > 1e-2


def test_an_averaging_optimizer_exports_its_average(tmp_path: Path) -> None:
    trained, only = cases.exported(fsdp2(), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    shapes = {name.removeprefix("model/"): value.shape for name, value in only.items()}
    of_checkpoint = checkpoint_weights(tmp_path / "checkpoint", shapes, "checkpoint.init_from")
    for name, value in only.items():
        assert torch.equal(written[name.removeprefix("model/")], value)
        assert torch.equal(of_checkpoint(name.removeprefix("model/")), value)
        assert not torch.equal(value, trained[name])
