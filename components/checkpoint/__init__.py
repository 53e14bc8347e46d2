"""Checkpoints that can be loaded by any engine in any layout."""

from components.checkpoint.folder import CheckpointMeta, complete_checkpoints, read_meta
from components.checkpoint.manager import CheckpointManager
from components.checkpoint.resume import (
    Resume,
    RunIdentity,
    newest_valid,
    resolve_checkpoint,
    run_order,
    verify_checkpoint,
)

__all__ = [
    "CheckpointManager",
    "CheckpointMeta",
    "Resume",
    "RunIdentity",
    "complete_checkpoints",
    "newest_valid",
    "read_meta",
    "resolve_checkpoint",
    "run_order",
    "verify_checkpoint",
]
