"""``run.compile=true``: compiled blocks compute what plain transformers computes."""

from pathlib import Path

from tests.distributed.adapter_cases import continued, plain_adapter
from tests.distributed.cases import assert_same, fsdp2, plain_step
from tests.distributed.compile_cases import one_step, one_step_in_4_bits, one_step_with_kernel
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
    (compiled,) = Ranks(1).run(one_step_in_4_bits, fsdp2(), adapter, seconds=150)
    assert_same(compiled.step, expected.first)
    assert compiled.graphs > 0


def test_a_block_with_the_kernel_for_packed_rows_is_one_graph() -> None:
    (compiled,) = Ranks(1).run(one_step_with_kernel, fsdp2(), "deep", seconds=150)
    assert_same(compiled.step, plain_step("deep", "token"))
    assert not compiled.breaks
    assert 0 < compiled.graphs <= 4
