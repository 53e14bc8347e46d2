"""What Hydra looks for in this place: it imports every module here whenever it starts."""
