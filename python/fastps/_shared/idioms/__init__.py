"""Idioms of Python: old names that warn, packages that are missing, and context managers that close."""
