"""Losses: pure functions of per-token log-probabilities."""

from components.losses.next_token import NextToken
from components.losses.pairs import Pairs, ReferencedLoss
from components.losses.preference import DPO
from components.losses.reference_free import CPO, ORPO
from components.losses.unpaired import KTO

__all__ = ["CPO", "DPO", "KTO", "ORPO", "NextToken", "Pairs", "ReferencedLoss"]
