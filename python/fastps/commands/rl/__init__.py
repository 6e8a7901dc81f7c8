"""The command `fastps rl`."""
