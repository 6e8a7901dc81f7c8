"""Training runs on a real store, each for a process."""
