"""Code that reads and writes the files that describe a run or a job of a sweep."""
