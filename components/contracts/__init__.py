"""What models, data, losses, engines and the runner agree on. Imports nothing of this project."""
