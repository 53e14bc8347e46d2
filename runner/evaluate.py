"""``python -m runner.evaluate``: see ``runner.commands.evaluate``."""

from runner.commands.evaluate import main

if __name__ == "__main__":
    main()
