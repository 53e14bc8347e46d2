"""What megatron-core tells every user at every start, and what none of them can act on."""

import logging
import warnings
from dataclasses import dataclass
from functools import cache

import torch

WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    ("Transformer Engine and Apex are not installed", UserWarning, r"megatron\.core"),
    ("Apex is not installed. Falling back to Torch Norm", UserWarning, r"megatron\.core"),
    ("full scope is deprecated", UserWarning, r"megatron\.core"),  # its own default, for CUDA graphs
    ("If you are using transformer_engine as the transformer impl", UserWarning, r"megatron\.core"),
    (r"\w+ is experimental and still under active development", UserWarning, r"megatron\.core"),
    # Its calls of torch; the names that replace them are not in every torch that it supports.
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning, r"torch\.distributed"),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning, r"torch\.distributed"),
)
"""How a message begins, its category, and the module that it is blamed on."""
ABOUT_GPUS = (
    (
        "When using async grad allreduce it is recommended to set the environment variable",
        UserWarning,
        r"megatron\.core",
    ),
)
"""Worth reading where there is one."""
RECORDS = {
    # On a CPU the two generators that it compares are one.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}
"""Logger: how the message begins."""


@dataclass(frozen=True)
class DropRecord:
    """A filter of log records: drops those that begin so."""

    start: str

    def __call__(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.start)


@cache
def install() -> None:
    """Silences these messages and no others, once a process; before the first import of megatron."""
    useless = WARNINGS if torch.cuda.is_available() else WARNINGS + ABOUT_GPUS
    for message, category, module in useless:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for logger, start in RECORDS.items():
        logging.getLogger(logger).addFilter(DropRecord(start))
