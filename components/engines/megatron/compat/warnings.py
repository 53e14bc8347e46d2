"""Filters for warnings that megatron-core gives at every start and that users cannot act on."""

import logging
import warnings
from collections.abc import Callable
from functools import cache

import torch

WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    ("Transformer Engine and Apex are not installed", UserWarning, r"megatron\.core"),
    ("Apex is not installed. Falling back to Torch Norm", UserWarning, r"megatron\.core"),
    ("full scope is deprecated", UserWarning, r"megatron\.core"),  # Megatron's own default, for CUDA graphs
    ("If you are using transformer_engine as the transformer impl", UserWarning, r"megatron\.core"),
    (r"\w+ is experimental and still under active development", UserWarning, r"megatron\.core"),
    # Megatron's calls of torch. Not every torch that it supports has the new names.
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning, r"torch\.distributed"),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning, r"torch\.distributed"),
)
"""The beginning of each message, its category, and the module that it is attributed to."""
ABOUT_GPUS = (
    (
        "When using async grad allreduce it is recommended to set the environment variable",
        UserWarning,
        r"megatron\.core",
    ),
)
"""Messages that are useful only if there is a GPU."""
RECORDS = {
    # On a CPU the two generators that are compared are the same.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}
"""Name of a logger -> the beginning of the message to drop."""


def without(start: str) -> Callable[[logging.LogRecord], bool]:
    """Return a filter that drops log records whose message begins with ``start``."""
    return lambda record: not str(record.msg).startswith(start)


@cache
def install() -> None:
    """Silence the messages listed above, once per process; call it before the first import of megatron."""
    useless = WARNINGS if torch.cuda.is_available() else WARNINGS + ABOUT_GPUS
    for message, category, module in useless:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for logger, start in RECORDS.items():
        logging.getLogger(logger).addFilter(without(start))
