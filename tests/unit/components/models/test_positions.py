"""Completions are not generated beyond the positions that a model has learned."""

import pytest
from transformers import GPT2Config, Qwen3Config

from components.contracts.errors import ConfigError
from components.models.generate import check_positions

SIZES = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def test_learned_positions_end() -> None:
    learned = GPT2Config(**SIZES, n_positions=16)
    check_positions(learned, 10, 6)
    with pytest.raises(ConfigError, match=r"10 tokens and 7 more are over .* 16 .*; use 6 or less"):
        check_positions(learned, 10, 7)
    rotary = Qwen3Config(**SIZES, intermediate_size=8, num_key_value_heads=1, max_position_embeddings=16)
    check_positions(rotary, 10, 7)
