"""Kinds of device."""

from typing import Literal

DeviceKind = Literal["cpu", "cuda", "xpu", "npu", "mps"]
"""The CPU, or a kind of accelerator by its name in torch."""
