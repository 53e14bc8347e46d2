"""What one rank does."""
