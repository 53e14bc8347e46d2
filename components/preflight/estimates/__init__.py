"""Estimates of memory, communication and time, without running anything."""
