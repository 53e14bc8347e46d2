"""The Megatron-Core engine; megatron itself is imported when an engine is built, and not before."""

from components.engines.megatron.config import Megatron

__all__ = ["Megatron"]
