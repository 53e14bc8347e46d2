"""Patches of megatron-core, installed before megatron is used."""
