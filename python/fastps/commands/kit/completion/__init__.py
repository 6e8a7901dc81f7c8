"""``fastps completion``: a script for the shell that completes commands, options and choices.

`tree` collects them from the parsers, those in Rust included; `scripts` writes them down for each shell.
"""
