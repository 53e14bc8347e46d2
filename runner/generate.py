"""``python -m runner.generate``: see ``runner.commands.generate``."""

from runner.commands.generate import main

if __name__ == "__main__":
    main()
