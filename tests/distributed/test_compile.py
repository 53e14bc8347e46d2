"""``run.compile=true``: compiled blocks compute what plain transformers computes."""

from pathlib import Path

from tests.distributed.adapter_cases import continued, plain_adapter
from tests.distributed.cases import Step, assert_same, fsdp2, make_engine, next_token, plain_step, share, step
from tests.distributed.compile_cases import one_step, one_step_with_kernel, one_traced_step
from tests.distributed.gradients import capture
from tests.ranks import Ranks

RECOMPUTED_TP2 = fsdp2(1, tp=2, activation_checkpointing="full")


def test_compiled_blocks_equal_plain_transformers() -> None:
    """Five blocks and eight lengths share graphs, which break at attention and at all-reduces."""
    ranks = Ranks(2)
    compiled, _ = ranks.run(one_step, RECOMPUTED_TP2, "deep", "packed", seconds=150)
    assert_same(compiled.step, plain_step("deep", "token"))
    assert 0 < compiled.graphs <= 12


def test_compiled_blocks_recompute_their_mlps() -> None:
    on = fsdp2(activation_checkpointing="selective", recompute_modules=("core_attn", "mlp"))
    (compiled,) = Ranks(1).run(one_step, on, "deep", "packed", seconds=150)
    assert_same(compiled.step, plain_step("deep", "token"))
    assert 0 < compiled.graphs <= 12


def test_compiled_blocks_in_4_bits_equal_plain_peft(tmp_path: Path) -> None:
    expected = plain_adapter("llama", "nf4", tmp_path)
    adapter = continued(tmp_path, quantize="nf4")
    (compiled,) = Ranks(1).run(one_traced_step, fsdp2(), "llama", adapter, seconds=150)
    assert_same(compiled.step, expected.first)
    assert compiled.graphs > 0


def test_compiled_blocks_drop_what_others_drop(tmp_path: Path) -> None:
    plain_adapter("llama", "attention", tmp_path)
    adapter = continued(tmp_path, dropout=0.3)
    (compiled,) = Ranks(1).run(one_traced_step, fsdp2(), "llama", adapter, seconds=150)
    engine = make_engine("llama", on=fsdp2(), adapter=adapter)
    grads = capture(engine)
    expected = step(engine, share(engine, "packed", 1), next_token())
    engine.close()
    assert_same(compiled.step, Step(expected.loss, expected.grad_norm, grads))
    assert 0 < compiled.graphs <= 16


def test_a_block_with_the_kernel_for_packed_rows_is_one_graph() -> None:
    (compiled,) = Ranks(1).run(one_step_with_kernel, fsdp2(), "deep", seconds=150)
    assert_same(compiled.step, plain_step("deep", "token"))
    assert not compiled.breaks
    assert 0 < compiled.graphs <= 4
