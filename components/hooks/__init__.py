"""Hooks of the ``hook`` group. Any number of them can be active, each under a name."""

from components.hooks.ema import EMA as EMA
from components.hooks.gradient_stats import GradientStats as GradientStats
from components.hooks.samples import Samples as Samples
