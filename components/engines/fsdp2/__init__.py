"""The FSDP2 engine for any transformers causal language model."""

from components.engines.fsdp2.config import FSDP2

__all__ = ["FSDP2"]
