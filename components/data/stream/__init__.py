"""Streams: training data that is larger than the disk or has no end.

The records of a stream are divided into chunks. A chunk is read, tokenised, shuffled and packed by itself, so
that its rows depend only on its number. Batches take the rows of one chunk after the other. A process of
rank 0 makes chunks a little ahead of training, in the run folder; every rank reads them there.
"""
