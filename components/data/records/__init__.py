"""From files to samples: sources, formats and messages."""
