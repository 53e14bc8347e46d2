"""``python -m runner.report``: see ``runner.commands.report``."""

from runner.commands.report import main

if __name__ == "__main__":
    main()
