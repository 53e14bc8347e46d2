"""Reductions of gradients over one rank, whose output is their input."""

import pytest
import torch

from components.engines.fsdp2.fsdp_private import InPlaceReduceScatter
from tests.distributed.cases import assert_same, engine_step, fsdp2, make_engine, next_token, plain_step

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_an_output_is_the_input_before_it() -> None:
    reduction = InPlaceReduceScatter()
    first, second, third = (reduction.allocate((4,), **PLACE) for _ in range(3))  # type: ignore[arg-type]
    assert second is first
    assert third is not first


def test_nothing_is_left_of_a_reduction_that_did_not_finish() -> None:
    reduction = InPlaceReduceScatter()
    unfinished = reduction.allocate((4,), **PLACE)  # type: ignore[arg-type]
    reduction.reset()
    assert reduction.allocate((4,), **PLACE) is not unfinished  # type: ignore[arg-type]


def test_gradients_that_are_added_to_others_have_their_own_memory() -> None:
    reduction = InPlaceReduceScatter()
    reduction.output_is_input = False
    first, second = (reduction.allocate((4,), **PLACE) for _ in range(2))  # type: ignore[arg-type]
    assert second is not first


def test_steps_are_those_of_transformers() -> None:
    on = fsdp2(1, reduce_gradients="every")  # test_normalisation has those of the default
    assert_same(engine_step("qwen3", "packed", 2, next_token(), on), plain_step("qwen3", "token"))


def test_only_the_first_gradients_of_a_step_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are wrong otherwise: a copy for nothing, or memory that is freed too early on a GPU."""
    shared: list[bool] = []
    plain = InPlaceReduceScatter.allocate

    def allocate(reduction: InPlaceReduceScatter, *args: object, **options: object) -> torch.Tensor:
        shared.append(reduction.output_is_input)
        return plain(reduction, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(InPlaceReduceScatter, "allocate", allocate)
    engine_step("qwen3", "packed", 4, next_token(), fsdp2(1, reduce_gradients="every"))
    half = len(shared) // 2
    assert shared == [True] * half + [False] * half
    assert half > 0


def test_offloaded_gradients_are_reduced_by_fsdp() -> None:
    engine = make_engine(on=fsdp2(1, cpu_offload=True))
    assert engine.scorer.in_place_reduction is None
    engine.close()
