"""``python -m runner.import_config``: see ``runner.commands.import_config``."""

from runner.commands.import_config import main

if __name__ == "__main__":
    main()
