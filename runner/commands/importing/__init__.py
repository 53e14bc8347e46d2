"""Translation of other tools' configurations into commands: see ``runner.commands.import_config``."""
