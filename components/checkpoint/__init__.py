"""Checkpoints that can be loaded by any engine in any layout."""

from components.checkpoint.folder import complete_checkpoints as complete_checkpoints
from components.checkpoint.folder import read_meta as read_meta
from components.checkpoint.manager import CheckpointManager as CheckpointManager
from components.checkpoint.resume import Resume as Resume
from components.checkpoint.resume import RunIdentity as RunIdentity
from components.checkpoint.resume import is_run_folder as is_run_folder
from components.checkpoint.resume import newest_of_runs as newest_of_runs
from components.checkpoint.resume import newest_valid as newest_valid
from components.checkpoint.resume import resolve_checkpoint as resolve_checkpoint
from components.checkpoint.resume import run_order as run_order
from components.checkpoint.resume import verify_checkpoint as verify_checkpoint
