"""A client's process: ``python -m fastps.commands.torture.client``."""
