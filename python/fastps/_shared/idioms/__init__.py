"""Idioms of Python: packages that are missing, and context managers that close."""
