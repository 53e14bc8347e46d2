"""One job of a sweep in its own process, which reads its config from standard input."""

import os
import pickle
import sys

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import open_dict

from runner.search_path import program_first, python_module
from runner.signals import die_with_parent
from runner.standard_streams import survive_closed_streams

COMMAND = tuple(python_module("hydra_plugins.runner_sweeps.local_job"))


def main() -> None:
    die_with_parent()
    program_first()
    survive_closed_streams()
    del os.environ["RUNNER_PARENT"]  # only for ranks
    setup_globals()
    sys.argv, config = pickle.load(sys.stdin.buffer)
    HydraConfig.instance().set_config(config)
    os.environ.update(config.hydra.job.env_set)
    with open_dict(config):
        del config["hydra"]
    from runner.cli import exit_code, run_job

    sys.exit(exit_code(lambda: run_job(config)))


if __name__ == "__main__":
    main()
