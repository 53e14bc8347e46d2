"""Tokens and reference log-probabilities on disk."""
