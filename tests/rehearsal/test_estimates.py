"""The estimates of preflight against the live memory and the traffic of rehearsals, for large models."""

from pathlib import Path

import pytest

from tests.rehearsal.rehearsed import GIB, rehearsed

ROW = ["run.dtype=bf16", "data.max_length=2048"]
LARGE = {
    "1b": ["model=llama3_1b", "parallelism=single"],
    "1b dora": ["model=llama3_1b", "parallelism=single", "adapter=dora"],
    "8b": ["model=llama3_8b", "parallelism=fsdp2", "parallelism.dp=8"],
    "8b lora": ["model=llama3_8b", "parallelism=fsdp2", "parallelism.dp=8", "adapter=lora"],
    "8b tp8": [
        "model=llama3_8b",
        "parallelism=fsdp2_tp2",
        "parallelism.tp=8",
        "parallelism.dp=8",
        "stage=dpo",
    ],
    "8b megatron": [
        "model=llama3_8b",
        "parallelism=tp2",
        "parallelism.dp=4",
        "parallelism.sequence_parallel=true",
        "parallelism.distributed_optimizer=true",
    ],
}
WITHIN = 0.03
FURTHER = {"8b lora": 0.04, "8b tp8": 0.04}
"""Rows whose estimate is further from the peak."""


@pytest.mark.parametrize("name", LARGE)
def test_the_estimate_is_the_peak(name: str, tmp_path: Path) -> None:
    full = "parallelism.activation_checkpointing=full"
    found = rehearsed(tmp_path, *ROW, "preflight.device_memory=400GiB", full, *LARGE[name])
    assert found.peak > GIB
    assert found.estimate == pytest.approx(found.peak, rel=FURTHER.get(name, WITHIN))
