"""The training of one rank."""
