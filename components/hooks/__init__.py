"""Hooks of the ``hook`` group. Any number of them can be active, each under a name."""

from components.hooks.ema import EMA
from components.hooks.gradient_stats import GradientStats
from components.hooks.samples import Samples

__all__ = ["EMA", "GradientStats", "Samples"]
