"""Sweeps: records, tables and launchers of their jobs."""
