"""``python -m runner.chat``: see ``runner.commands.chat``."""

from runner.commands.chat import main

if __name__ == "__main__":
    main()
