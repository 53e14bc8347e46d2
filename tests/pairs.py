"""Preference data of random tokens in a token store."""

from pathlib import Path

import numpy as np

from components.data.packing import Plan, PlanOptions, plan_epoch
from components.data.shared_prefix import shared_lengths
from components.data.store.token_store import TokenStore
from tests.unit.components.data.store.test_token_store import make_store

PAIRS = [(9, 5, 7), (1, 6, 3), (4, 12, 3), (2, 1, 8), (14, 3, 1)]
"""Numbers of tokens of prompt, chosen and rejected answer. A prompt of one token cannot be shared."""
VOCABULARY = 97


def make_pairs(path: Path) -> TokenStore:
    rng = np.random.default_rng(0)
    sequences, masks = [], []
    for prompt, *answers in PAIRS:
        tokens = rng.integers(0, VOCABULARY, prompt).tolist()
        for answer in answers:
            sequences.append(tokens + rng.integers(0, VOCABULARY, answer).tolist())
            masks.append([0] * prompt + [1] * answer)
    return make_store(path, sequences, masks, per_sample=2, vocab_size=VOCABULARY)


def plan_pairs(store: TokenStore, *, shared: bool, max_length: int) -> Plan:
    return plan_epoch(
        store.lengths,
        PlanOptions("bfd", max_length, shuffle=False),
        epoch=0,
        sequences_per_sample=2,
        shared=shared_lengths(store) if shared else None,
    )
