"""A run that was saved on any engine and layout resumes on any other as if it had not been interrupted."""

import math

import pytest

from tests.distributed.any_to_any_cases import (
    HALF,
    OF_PAIRS,
    STEPS,
    Matrix,
    assert_close_moments,
    assert_equal,
    assert_same_steps,
    read,
)

CHAINS = [
    ("full", "tp2pp2", "fsdp2", "single", "pp2vpp2"),
    ("full", "hsdp", "dp2 sharded", "fsdp2 cp2", "tp2cp2"),
    ("full", "fsdp2 tp2", "pp2vpp2cp2", "pp2", "tp2pp2"),
    ("lora dropout", "tp2", "dp2 sharded", "fsdp2 cp2", "hsdp"),
    ("lora dropout", "fsdp2 offload", "tp2pp2", "fsdp2 tp2", "pp2vpp2"),
    ("pissa", "pp2vpp2", "fsdp2 tp2", "tp2pp2"),
    ("qlora", "fsdp2 cp2", "hsdp"),
    ("dpo", "tp2", "fsdp2", "pp2"),
    ("rm", "tp2pp2", "fsdp2 tp2", "pp2"),
    ("lora rm", "dp2 sharded", "hsdp"),
    ("tr-dpo wpo", "dp2 sharded", "fsdp2 tp2", "tp2pp2"),
    ("neftune", "tp2cp2", "fsdp2 cp2"),
    ("fp8", "fsdp2", "hsdp"),
    ("experts", "fsdp2 ep2", "tp2ep2etp2"),
    ("deepseek", "dp4ep2 sharded", "fsdp2 tp2ep2", "pp2ep2", "fsdp2 cp2ep2"),
    ("muon", "tp2dp2 whole", "fsdp2 tp2", "pp2vpp2cp2", "hsdp"),
]
"""Cases: the work, the layout of the first run, and the layouts of the runs that resume it, one by one."""
SAME = [
    ("full", "hsdp"),
    ("full", "tp2pp2"),
    ("pissa", "pp2vpp2"),
    ("attention dropout", "fsdp2"),
    ("attention dropout", "dp2 sharded"),
    ("dpo", "tp2"),
    ("rm", "pp2"),
    ("lora rm", "dp2 sharded"),
    ("tr-dpo wpo", "dp2 sharded"),
    ("deepseek", "dp4ep2 sharded"),
    ("muon", "tp2dp2 whole"),
    ("neftune", "tp2cp2"),
    ("fp8", "fsdp2"),
    ("fp16", "fsdp2 tp2"),
    ("fp16", "pp2vpp2cp2"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_a_run_goes_on_in_other_layouts(matrix: Matrix, chain: tuple[str, ...]) -> None:
    """The state that each layout has read is the one written, and close to that of one process."""
    work, first, *others = chain
    reference, run = matrix.whole(work, "single"), matrix.whole(work, first)
    assert reference.rows[-1]["train/total_skipped"] == (work not in OF_PAIRS)
    # A pair's gradient is the difference of those of two answers, with the rounding errors of both.
    times = 2 if work in OF_PAIRS else 1
    assert_close_moments(read(run.point(HALF)), read(reference.point(HALF)), times)  # after the skipped step
    for step, layout in enumerate(others, start=min(HALF, STEPS - len(others))):
        written = read(run.point(step))
        run = matrix.resumed(work, layout, run.point(step))
        assert_equal(read(run.loaded), written)
        assert written["optimizer_step"].item() == step - (work not in OF_PAIRS), (
            "a skipped step is not counted"
        )
        assert_close_moments(written, read(reference.point(step)), times)
        assert_same_steps(run, reference)


@pytest.mark.parametrize(("work", "layout"), SAME)
def test_the_same_layout_goes_on_bitwise(matrix: Matrix, work: str, layout: str) -> None:
    """Random generators are restored too, so that the dropout of attention is the same."""
    whole = matrix.whole(work, layout)
    rest = matrix.resumed(work, layout, whole.point(HALF))
    assert rest.rows == whole.rows[HALF:]
    for ours, theirs in ((rest.loaded, whole.point(HALF)), (rest.point(STEPS), whole.point(STEPS))):
        assert_equal(read(ours, streams=True), read(theirs, streams=True))


def test_a_run_begins_with_the_weights_of_another_layout(matrix: Matrix) -> None:
    """Each rank reads its slices of the weights twice, for the policy and for the reference model."""
    begin = f"checkpoint.init_from={matrix.whole('full', 'dp2 sharded').point(HALF)}"
    reference = matrix.run("dpo", "single", begin)
    assert reference.rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert reference.rows[0]["train/grad_norm"] != matrix.whole("dpo", "single").rows[0]["train/grad_norm"]
    for layout in ("tp2pp2", "hsdp"):
        assert_same_steps(matrix.run("dpo", layout, begin), reference)
