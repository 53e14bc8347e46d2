"""Configurations of other tools as commands: see ``runner.commands.import_config``."""
