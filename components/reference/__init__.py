"""The reference model of preference losses, and its precomputed log-probabilities."""
