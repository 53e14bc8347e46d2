"""Losses: pure functions of per-token log-probabilities."""

from components.losses.cpo_orpo import CPO, ORPO
from components.losses.kto import KTO
from components.losses.next_token import NextToken
from components.losses.preference import DPO
from components.losses.preference_base import Pairs, ReferencedLoss

__all__ = ["CPO", "DPO", "KTO", "ORPO", "NextToken", "Pairs", "ReferencedLoss"]
