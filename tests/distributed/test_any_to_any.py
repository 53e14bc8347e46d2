"""A run that was saved on any engine and layout resumes on any other as if it had not been interrupted."""

import math

import pytest

from tests.distributed.any_to_any_cases import (
    HALF,
    OF_PAIRS,
    STEPS,
    Matrix,
    Run,
    assert_close_moments,
    assert_equal,
    assert_same_steps,
    read,
)

PAIRS = [
    ("full", "fsdp2", "tp2pp2"),
    ("full", "hsdp", "dp2 sharded"),
    ("full", "fsdp2 tp2", "pp2vpp2cp2"),
    ("full", "dp2 sharded", "fsdp2 cp2"),
    ("full", "pp2vpp2cp2", "single"),
    ("full", "fsdp2 cp2", "tp2cp2"),
    ("full", "tp2cp2", "pp2"),
    ("lora", "fsdp2 offload", "tp2pp2"),
    ("lora", "pp2vpp2", "hsdp"),
    ("lora", "dp2 sharded", "fsdp2 tp2"),
    ("lora", "tp2", "dp2 sharded"),
    ("lora dropout", "fsdp2 tp2", "pp2vpp2"),
    ("lora dropout", "dp2 sharded", "fsdp2 cp2"),
    ("pissa", "tp2pp2", "fsdp2 tp2"),
    ("pissa", "hsdp", "pp2vpp2"),
    ("qlora", "fsdp2 cp2", "hsdp"),
    ("dpo", "fsdp2", "pp2"),
    ("dpo", "tp2", "fsdp2"),
    ("rm", "pp2", "fsdp2 tp2"),
    ("rm", "fsdp2 cp2", "tp2pp2"),
    ("lora rm", "hsdp", "tp2pp2"),
    ("tr-dpo", "fsdp2 tp2", "tp2pp2"),
    ("tr-dpo", "dp2 sharded", "fsdp2"),
    ("wpo", "pp2", "fsdp2 tp2"),
    ("neftune", "fsdp2 cp2", "tp2pp2"),
    ("fp8", "fsdp2", "hsdp"),
    ("experts", "fsdp2 ep2", "tp2ep2etp2"),
    ("experts", "dp4ep2 sharded", "fsdp2 tp2ep2"),
    ("deepseek", "pp2ep2", "fsdp2 cp2ep2"),
    ("deepseek", "fsdp2 tp2ep2", "dp4ep2 sharded"),
    ("muon", "fsdp2 tp2", "tp2dp2 whole"),
    ("muon", "tp2dp2 whole", "hsdp"),
    ("muon", "pp2vpp2cp2", "fsdp2"),
    ("muon", "fsdp2 cp2", "pp2vpp2"),
]
SAME = [
    ("full", "hsdp"),
    ("full", "tp2pp2"),
    ("full", "pp2vpp2cp2"),
    ("pissa", "tp2"),
    ("attention dropout", "fsdp2"),
    ("attention dropout", "dp2 sharded"),
    ("dpo", "tp2"),
    ("rm", "pp2"),
    ("rm", "fsdp2 tp2"),
    ("lora rm", "dp2 sharded"),
    ("tr-dpo", "dp2 sharded"),
    ("deepseek", "dp4ep2 sharded"),
    ("muon", "tp2dp2 whole"),
    ("neftune", "tp2cp2"),
    ("fp8", "fsdp2 cp2"),
    ("fp16", "fsdp2 tp2"),
    ("fp16", "pp2vpp2cp2"),
]
CHAIN = ("tp2pp2", "fsdp2", "single", "pp2vpp2")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def assert_goes_on(matrix: Matrix, work: str, before: Run, step: int, layout: str, *more: str) -> Run:
    """Resume from the checkpoint of ``before`` at ``step``, check the run on ``layout``, and return it."""
    reference = matrix.whole(work, "single")
    after = matrix.resumed(work, layout, before.point(step), *more)
    written = read(before.point(step))
    assert_equal(read(after.loaded), written)
    assert written["optimizer_step"].item() == step - (work not in OF_PAIRS), (
        "the optimizer counts no skipped step"
    )
    assert_same_steps(after, reference)
    return after


@pytest.mark.parametrize(("work", "before", "after"), PAIRS)
def test_a_run_goes_on_in_another_layout(matrix: Matrix, work: str, before: str, after: str) -> None:
    reference, saved = matrix.whole(work, "single"), matrix.whole(work, before)
    assert reference.rows[-1]["train/total_skipped"] == (work not in OF_PAIRS)
    rest = assert_goes_on(matrix, work, saved, HALF, after)
    # A pair's gradient is the difference of two scores' gradients, with the rounding errors of both.
    times = 2 if work in ("rm", "lora rm") else 1
    assert_close_moments(read(rest.loaded), read(reference.point(HALF)), times)


@pytest.mark.parametrize(("work", "layout"), SAME)
def test_the_same_layout_goes_on_bitwise(matrix: Matrix, work: str, layout: str) -> None:
    """Random generators are restored too, so that the dropout of attention is the same."""
    whole = matrix.whole(work, layout)
    rest = matrix.resumed(work, layout, whole.point(HALF))
    assert rest.rows == whole.rows[HALF:]
    for ours, theirs in ((rest.loaded, whole.point(HALF)), (rest.point(STEPS), whole.point(STEPS))):
        assert_equal(read(ours, streams=True), read(theirs, streams=True))


def test_a_chain_of_four_layouts(matrix: Matrix) -> None:
    every = "checkpoint.save_every=1"
    run = matrix.run("full", CHAIN[0], every)
    for step, layout in enumerate(CHAIN[1:], start=2):
        run = assert_goes_on(matrix, "full", run, step, layout, every)


def test_a_run_begins_with_the_weights_of_another_layout(matrix: Matrix) -> None:
    """Each rank reads its slices of the weights twice, for the policy and for the reference model."""
    begin = f"checkpoint.init_from={matrix.whole('full', 'pp2vpp2cp2').point(HALF)}"
    reference = matrix.run("dpo", "single", begin)
    assert reference.rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert reference.rows[0]["train/grad_norm"] != matrix.whole("dpo", "single").rows[0]["train/grad_norm"]
    for layout in ("tp2pp2", "hsdp"):
        assert_same_steps(matrix.run("dpo", layout, begin), reference)
