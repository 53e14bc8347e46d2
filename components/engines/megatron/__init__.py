"""The Megatron-Core engine. megatron itself is imported only when an engine is built."""

from components.engines.megatron.config import Megatron

__all__ = ["Megatron"]
