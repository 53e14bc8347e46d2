"""Checks and estimates of a run before a process is spawned or a process group is created."""
