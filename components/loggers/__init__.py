"""Loggers of the metrics of a run. Any number of them can be active, each under a name."""

from components.loggers.base import Logger as Logger
from components.loggers.base import LoggerSpec as LoggerSpec
from components.loggers.base import Row as Row
from components.loggers.base import RunInfo as RunInfo
from components.loggers.base import RunResult as RunResult
from components.loggers.composite import CompositeLogger as CompositeLogger
from components.loggers.console import Console as Console
from components.loggers.console import terminal as terminal
from components.loggers.jsonl import Jsonl as Jsonl
from components.loggers.tensorboard import Tensorboard as Tensorboard
from components.loggers.wandb import Wandb as Wandb
