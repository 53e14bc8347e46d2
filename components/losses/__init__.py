"""Losses: pure functions of per-token log-probabilities, or of the scores of a reward model."""

from components.losses.cpo_orpo import CPO, ORPO
from components.losses.kto import KTO
from components.losses.next_token import NextToken
from components.losses.preference import DPO
from components.losses.preference_base import Pairs, ReferencedLoss
from components.losses.reward import Reward

__all__ = ["CPO", "DPO", "KTO", "ORPO", "NextToken", "Pairs", "ReferencedLoss", "Reward"]
