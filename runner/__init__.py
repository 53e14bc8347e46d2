"""The command line: compose an experiment, check it, start its ranks and run the training loop."""

from runner.search_path import find_own_packages

find_own_packages()
