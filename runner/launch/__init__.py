"""From checked objects to running ranks and a run folder."""
