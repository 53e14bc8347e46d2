"""Losses: pure functions of per-token log-probabilities."""

from components.losses.next_token import NextToken
from components.losses.preference import DPO

__all__ = ["DPO", "NextToken"]
