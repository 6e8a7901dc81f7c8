"""Runs on this machine: their processes, their record, the command line."""
