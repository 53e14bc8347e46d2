"""Commands besides ``python -m runner``."""
