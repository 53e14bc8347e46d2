"""The proof of an experiment: a small model trains the same curve in its layout and in one process."""
