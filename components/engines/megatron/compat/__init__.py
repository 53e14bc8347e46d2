"""Patches of megatron-core, which is imported after they are installed."""
