"""The files that describe a run or a job of a sweep, and how they are read again."""
