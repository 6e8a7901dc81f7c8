"""A worker's view of the whole run: the progress of all workers together."""
