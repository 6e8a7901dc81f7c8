"""What a worker knows of the whole run: how far all workers together are."""
