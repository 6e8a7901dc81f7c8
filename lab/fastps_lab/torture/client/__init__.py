"""A client's process: ``python -m fastps_lab.torture.client``."""
