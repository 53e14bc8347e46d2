"""What every engine uses."""
