"""Checkpoints that any engine and any layout reads."""

from components.checkpoint.folder import CheckpointMeta, RunIdentity, read_meta, resume_point
from components.checkpoint.policy import CheckpointPolicy

__all__ = ["CheckpointMeta", "CheckpointPolicy", "RunIdentity", "read_meta", "resume_point"]
