"""``fastps run``: servers and the workers of a script on this machine, each its own process."""
