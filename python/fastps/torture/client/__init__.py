"""A client's process: ``python -m fastps.torture.client``."""
