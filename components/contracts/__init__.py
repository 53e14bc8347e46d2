"""Interfaces between models, data, losses, engines and the runner. They import only each other."""
