"""Interfaces between models, data, losses, engines and the runner. They import no other project code."""
