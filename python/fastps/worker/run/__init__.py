"""A worker among the others of a run: groups, warm start, waits, seeds, and the progress of all together."""
