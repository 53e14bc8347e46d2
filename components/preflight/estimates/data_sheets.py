"""Properties of GPUs from NVIDIA's data sheets."""

from typing import NamedTuple


class DataSheet(NamedTuple):
    """The data sheet of one GPU."""

    memory: int
    """Memory in GB. A card reports slightly more; the difference is left for CUDA and NCCL."""
    link: float
    """Bytes/s to another GPU of the node in one direction, by NVLink or otherwise by PCIe 4 x16."""
    half: float
    """FLOP/s of dense bf16 or fp16 tensor cores."""
    full: float
    """FLOP/s in fp32 without TF32."""
    capability: tuple[int, int]


GPUS = {
    "A100": DataSheet(80, 300e9, 312e12, 19.5e12, (8, 0)),
    "A10": DataSheet(24, 32e9, 125e12, 31.2e12, (8, 6)),
    "B200": DataSheet(180, 900e9, 2250e12, 75e12, (10, 0)),
    "GH200": DataSheet(96, 450e9, 989e12, 67e12, (9, 0)),
    "H100 NVL": DataSheet(94, 300e9, 835e12, 60e12, (9, 0)),
    "H100 PCIe": DataSheet(80, 300e9, 756e12, 51e12, (9, 0)),
    "H100": DataSheet(80, 450e9, 989e12, 67e12, (9, 0)),
    "H200 NVL": DataSheet(141, 450e9, 835e12, 60e12, (9, 0)),
    "H200": DataSheet(141, 450e9, 989e12, 67e12, (9, 0)),
    "L4": DataSheet(24, 32e9, 121e12, 30.3e12, (8, 9)),
    "L40S": DataSheet(48, 32e9, 362e12, 91.6e12, (8, 9)),
    "RTX 3090": DataSheet(24, 32e9, 71e12, 35.6e12, (8, 6)),
    "RTX 4090": DataSheet(24, 32e9, 165e12, 82.6e12, (8, 9)),
    "RTX A6000": DataSheet(48, 32e9, 155e12, 38.7e12, (8, 6)),
}
LONGEST_FIRST = sorted(GPUS, key=len, reverse=True)
