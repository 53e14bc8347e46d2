"""The command line: composes an experiment, checks it, starts its ranks and runs the training loop."""

import sys

if sys.argv[:1] == ["-m"]:  # Python is looking for `python -m runner...`, with the working directory first
    from runner.search_path import program_first

    program_first()
