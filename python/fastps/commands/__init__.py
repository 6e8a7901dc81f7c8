"""The command line: `cli` has the parser, and each command a module or a folder."""
