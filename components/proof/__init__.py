"""The proof of an experiment: a small model has the same curve in its layout as in one process."""
