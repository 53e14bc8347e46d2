"""The command line: compose an experiment, check it, start its ranks and run the training loop."""

from runner.search_path import ensure_own_packages

ensure_own_packages()
