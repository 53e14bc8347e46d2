"""The command line: composes an experiment, checks it, starts its ranks and runs the training loop."""

from runner.search_path import prepare

prepare()
