"""``python -m runner.export``: see ``runner.commands.export``."""

from runner.commands.export import main

if __name__ == "__main__":
    main()
