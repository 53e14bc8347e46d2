"""Candidate layouts, and what to change when a run does not fit."""
