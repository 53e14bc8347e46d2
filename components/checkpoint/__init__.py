"""Checkpoints that can be loaded by any engine in any layout."""

from components.checkpoint.folder import CheckpointMeta, complete_checkpoints, read_meta
from components.checkpoint.manager import CheckpointPolicy
from components.checkpoint.resume import Resume, RunIdentity, check_whole, newest_undamaged, whole_checkpoint

__all__ = [
    "CheckpointMeta",
    "CheckpointPolicy",
    "Resume",
    "RunIdentity",
    "check_whole",
    "complete_checkpoints",
    "newest_undamaged",
    "read_meta",
    "whole_checkpoint",
]
