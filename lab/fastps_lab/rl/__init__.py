"""The command `fastps-lab rl`."""
