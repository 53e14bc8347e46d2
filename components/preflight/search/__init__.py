"""Candidate layouts, and changes with which a run fits in memory."""
