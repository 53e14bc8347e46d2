"""The FSDP2 engine as a state machine, on one and two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from components.adapters import LoRA
from components.optimizers import AdamW, Muon, Optimizer, TorchClass
from tests.distributed import engine_cases as cases
from tests.distributed.cases import fsdp2, make_engine, plain_model, plain_step
from tests.ranks import Ranks

Run = Callable[..., list[Any]]
KINDS = ["adamw", "muon", "class"]


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest, two: Ranks) -> Run:
    """Return a function that calls ``function(layout, ...)`` on one or two ranks."""

    def call(function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(fsdp2(1), *args)] if request.param == 1 else two.run(function, fsdp2(2), *args)

    return call


@pytest.mark.parametrize("detour", [cases.two_steps_and_an_error, cases.two_steps_and_an_abort])
def test_abort_leaves_no_trace(run: Run, detour: Callable[..., Any]) -> None:
    expected = run(cases.two_steps)
    for (unchanged, result, after), (straight, state) in zip(run(detour), expected, strict=True):
        assert unchanged
        assert result == straight
        assert cases.identical(after, state)


@pytest.mark.parametrize(
    "optimizer", [AdamW(lr=1e-3), Muon(lr=1e-3), TorchClass(torch.optim.NAdam, 1e-3)], ids=KINDS
)
def test_a_trial_has_the_state_of_later_steps(run: Run, optimizer: Optimizer) -> None:
    for within, after, changed in run(cases.state_of_a_trial, optimizer):
        assert within == after > 0
        assert not changed


@pytest.mark.parametrize("adapter", [None, LoRA()], ids=["full", "lora"])
def test_no_weight_outlives_its_engine(run: Run, adapter: LoRA | None) -> None:
    for number, alive in run(cases.weights_after_the_end, adapter):
        assert number > 0
        assert alive == 0


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_bad_rank_makes_all_skip(two: Ranks, bad_rank: int) -> None:
    assert two.run(cases.skip_when_one_rank_is_not_finite, fsdp2(2), bad_rank) == [(True, True, True)] * 2


def test_a_loss_that_is_too_high_makes_all_skip(run: Run) -> None:
    assert set(run(cases.skip_when_the_loss_is_too_high)) == {(True, True, True)}


def test_streamed_counts_and_many_calls(run: Run) -> None:
    for many, one in zip(run(cases.streamed, True), run(cases.streamed, False), strict=True):
        assert many.loss == pytest.approx(one.loss, rel=1e-6)
        assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_bf16_follows_fp32(run: Run) -> None:
    single = torch.tensor(cases.curve(fsdp2(1), torch.float32))
    for other in run(cases.curve, torch.bfloat16):
        assert torch.tensor(other) == pytest.approx(single, rel=3e-2)
        assert not torch.equal(torch.tensor(other), single)


def test_evaluation_has_the_training_normalisation(run: Run) -> None:
    expected = plain_step("qwen3", "token").loss
    for evaluated, trained in run(cases.evaluate):
        assert evaluated == pytest.approx(expected, rel=1e-5)
        assert trained == pytest.approx(expected, rel=1e-5)


def test_the_reference_is_frozen(run: Run) -> None:
    assert all(run(cases.reference_logps))


def test_weights_of_sequences_stay_fp32_in_bf16(run: Run) -> None:
    exact = cases.bf16_by_sequence(fsdp2(1), torch.float32)
    for result in run(cases.bf16_by_sequence, torch.bfloat16):
        assert result.loss == pytest.approx(exact.loss, rel=2e-2)
        assert result.grad_norm == pytest.approx(exact.grad_norm, rel=3e-2)


def test_logps_see_an_update_made_after_a_look(run: Run) -> None:
    for seen, expected in run(cases.logps_around_an_update):
        assert torch.equal(seen, expected)


def test_abort_by_hand_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers torch before 2.13, which has no ``reset_iter_state``."""
    expected, state = cases.two_steps(fsdp2(1))
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    unchanged, result, after = cases.two_steps_and_an_error(fsdp2(1))
    assert unchanged
    assert result == expected
    assert cases.identical(after, state)


def test_a_failed_build_leaves_the_process_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("components.engines.fsdp2.engine.ShardedOptimizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_engine()
    make_engine().close()


def test_zeros_are_counted_once(two: Ranks) -> None:
    grads = plain_step("llama", "token").grads
    expected = sum(int((g == 0).sum()) for g in grads.values())
    assert expected > 0  # embeddings of tokens that do not occur have zero gradients
    assert cases.zeros_in_grad(fsdp2(1)) == expected
    assert two.run(cases.zeros_in_grad, fsdp2(2)) == [expected] * 2


def test_the_order_of_calls_is_checked() -> None:
    cases.call_out_of_order(fsdp2())


def test_export_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = make_engine("llama")
    engine.export(tmp_path)
    engine.close()
    exported, reference = AutoModelForCausalLM.from_pretrained(tmp_path), plain_model("llama")
    for name, parameter in reference.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name


def test_ranks_agree_on_the_largest(two: Ranks) -> None:
    assert two.run(cases.largest_rank, fsdp2(2)) == [11.0, 11.0]


def test_where_memory_ends_is_named(run: Run) -> None:
    for said, number in run(cases.words_where_memory_ends, 2):
        assert len(said) == 2
        for words in said:
            assert words.startswith(f"out of memory in micro-batch 2 of {number} (1 row, ")
