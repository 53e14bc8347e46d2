"""Read files into samples: sources, formats and messages."""
